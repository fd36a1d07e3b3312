"""How many GPUs a test needs: ``pytest.mark.gpu``, or ``pytest.mark.gpu(count=8)``; and of fake ones, in which mode."""

import sys
from collections.abc import Iterable

import pytest

from refshard.fakecuda import is_active
from refshard.fakecuda.build import NAME

_DRY = is_active() and sys.modules[NAME].is_dry()
needs_values = pytest.mark.skipif(_DRY, reason="a dry run computes nothing; run it in host compute")
needs_allocations = pytest.mark.skipif(
    is_active() and not _DRY, reason="in host compute operators allocate as a CPU's do; run it dry"
)


def lacking(marks: Iterable[pytest.Mark], there: int) -> str:
    """Why a test with these ``gpu`` marks cannot run on a machine with ``there`` GPUs; empty if it can.

    Raises:
        TypeError: a mark has other arguments than ``count``.
    """
    needed = max((_count(*mark.args, **mark.kwargs) for mark in marks), default=0)
    if needed <= there:
        return ""
    return f"needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {there or 'none'}"


def _count(*, count: int = 1) -> int:
    return count
