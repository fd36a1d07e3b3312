"""Tests of ``refshard/harness/doctor``."""
