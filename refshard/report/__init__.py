"""Records become tables, charts and a page."""
