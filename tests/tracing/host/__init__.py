"""Tests of refshard.tracing.host."""
