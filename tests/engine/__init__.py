"""Tests of refshard.engine."""
