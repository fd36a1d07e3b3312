"""Tests of refshard.tracing.files."""
