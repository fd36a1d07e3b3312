"""Tests of ``refshard/analysis``."""
