"""Tests of what specs say and refuse."""
