"""What users wrote imports frameworks that are installed elsewhere."""

collect_ignore = ["scripts"]
