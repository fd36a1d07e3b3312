"""What accounts for the change in step time between two traces, or two jobs."""
