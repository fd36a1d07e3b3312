"""Results become words, tables, charts and pages."""
