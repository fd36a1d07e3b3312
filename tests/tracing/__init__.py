"""Tests of refshard.tracing."""
