"""Tests of ``refshard/harness/launchers``."""
