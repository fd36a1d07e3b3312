"""Tests of refshard.dryrun."""
