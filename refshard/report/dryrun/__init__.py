"""A dry run: report, page, and comparison with published runs."""
