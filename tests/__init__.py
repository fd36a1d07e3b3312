"""Tests, laid out as ``refshard/`` is."""
