"""Measuring this machine as the ranks of a training run would find it: all of them at once, over the real backend."""
