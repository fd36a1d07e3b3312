"""Tests of ``refshard/report/trace``."""
