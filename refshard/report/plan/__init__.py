"""A plan: its table, its page and its text."""
