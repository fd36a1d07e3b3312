"""Modules that give the process that imports them a node of fake H100s, before it imports torch: one for each mode."""

import sys

from refshard.fakecuda.build import NAME


def module_of_this_device() -> str:
    """The module that gives another process what this one has."""
    return f"{__name__}.{'dry' if sys.modules[NAME].is_dry() else 'host'}"
