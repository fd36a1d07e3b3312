"""Tests of ``refshard/report/run``."""
