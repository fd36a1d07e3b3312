"""Tests of :mod:`refshard.stats`."""
