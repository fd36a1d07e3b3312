"""Tests of refshard.tracing.allocator."""
