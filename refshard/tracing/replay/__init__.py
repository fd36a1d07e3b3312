"""A trace's own dependency graph, replayed with changes."""
