"""Traces and records become figures: breakdowns, what-ifs, comparisons, rankings, statistics. Values only, no text."""
