"""Tests of ``refshard/report/draw``."""
