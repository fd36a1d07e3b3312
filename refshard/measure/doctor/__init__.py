"""Whether this machine can measure: facts about it, what can run on it, and what would be wrong."""
