"""Tests marked ``full`` take over an hour: `.ci/run` takes one part of their files, another with each commit."""

import argparse
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def places(text: str) -> tuple[int, int]:
    """``"2/6"`` as ``(2, 6)``: the second of six parts."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"a part is K/N with 1 <= K <= N, such as 2/6, got {text!r}")
    return int(found[1]), int(found[2])


def part_of(files: Sequence[T], part: tuple[int, int]) -> Sequence[T]:
    """Every N-th file from the K-th on, so that the largest files, which come first, lie in different parts."""
    return files[part[0] - 1 :: part[1]]
