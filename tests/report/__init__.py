"""Tests of :mod:`refshard.report`, on a run made by hand."""
