"""The version: every reader of it, the build included, takes it from here, so that a tree need not be installed."""

__version__ = "0.1.0"
