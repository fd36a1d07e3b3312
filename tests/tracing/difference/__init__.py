"""Tests of refshard.tracing.difference."""
