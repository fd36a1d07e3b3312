"""Tests of ``refshard/harness/gate``."""
