"""Tests of ``refshard/estimate``."""
