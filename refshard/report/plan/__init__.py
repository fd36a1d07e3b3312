"""A plan, and predictions beside published results."""
