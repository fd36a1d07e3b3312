"""What starts the ranks of a case."""
