"""Tests of refshard.events."""
