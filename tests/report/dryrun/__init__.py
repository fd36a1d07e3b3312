"""Tests of ``refshard/report/dryrun``."""
