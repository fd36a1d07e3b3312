"""Analysed traces: tables, timeline, page."""
