"""Tests of refshard.tracing.operators."""
