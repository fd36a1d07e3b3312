"""Records become results: cases, settings that may be compared, rankings, ratios. Values only, no words."""
