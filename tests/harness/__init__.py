"""Tests of refshard.harness."""
