"""Trace files become columns."""
