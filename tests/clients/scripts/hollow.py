"""Checkpoints with names, shapes and dtypes but no values: the file has a hole that takes no room on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def save(shapes: Mapping[str, Sequence[int]], path: Path) -> None:
    """Write weights in bf16 as ``torch.save`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FakeTensorMode():
        weights = {name: torch.empty(tuple(shape), dtype=torch.bfloat16) for name, shape in shapes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(weights, path)
