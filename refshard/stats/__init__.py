"""Verdicts from samples."""
