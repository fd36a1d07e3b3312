"""Tests that train on several ranks over gloo."""
