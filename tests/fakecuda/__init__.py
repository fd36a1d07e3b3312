"""Tests of the fake CUDA device."""
