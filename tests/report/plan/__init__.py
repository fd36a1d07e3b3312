"""Tests of ``refshard/report/plan``."""
