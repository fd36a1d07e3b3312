"""Dry runs: a script or a strategy on a fake CUDA device; what it asked of the device, and how long that would take."""
