"""Ranks that a torchrun of the user has started."""
