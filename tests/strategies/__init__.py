"""Tests of refshard.strategies."""
