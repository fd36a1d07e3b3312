"""Tests of ``refshard/measure/gate``."""
