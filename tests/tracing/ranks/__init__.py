"""Tests of refshard.tracing.ranks."""
