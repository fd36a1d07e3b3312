"""A gate's findings."""
