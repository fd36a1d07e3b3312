"""Tests of refshard.plan."""
