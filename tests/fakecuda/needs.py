"""What tests on the fake device need."""

import shutil

import pytest

needs_device = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the fake CUDA device is built with g++, which is not installed"
)
