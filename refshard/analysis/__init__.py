"""Records become results: cases, settings that may be compared, contests, ratios. Values only, no words."""
