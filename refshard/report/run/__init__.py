"""A run, or several: verdict, tables, dashboard."""
