"""A step's memory, walked allocation by allocation without a tensor."""
