"""Tests of refshard.tracing.replay."""
