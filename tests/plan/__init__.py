"""Tests of ``refshard/plan``."""
