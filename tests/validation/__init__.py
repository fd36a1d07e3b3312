"""Tests of validation: published figures beside predictions."""
