"""Tests of ``refshard/measure/doctor``."""
