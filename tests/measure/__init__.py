"""Tests of refshard.measure."""
