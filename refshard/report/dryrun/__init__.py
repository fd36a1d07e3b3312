"""A dry run: report, page, and published runs beside theirs."""
