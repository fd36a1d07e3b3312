"""Tests of refshard.commands."""
