"""Tests of ``refshard/measure/launchers``."""
