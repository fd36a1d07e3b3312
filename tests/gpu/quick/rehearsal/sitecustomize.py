"""Gives every Python process that finds this on its path fake GPUs that compute on the host."""

import tests.fakecuda.devices.host  # noqa: F401
