"""Tests of ``refshard/report/gate``."""
