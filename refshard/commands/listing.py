"""``refshard list``: the names that suites may use."""

from collections.abc import Callable
from typing import get_args

from tabulate import tabulate

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.plan.placement import MODES
from refshard.strategies.table import ROWS, Axis, axes_unavailable

_HEADS: dict[Axis, str] = {
    "inference": "infer", "microbatches": "micro", "checkpointing": "ckpt", "bf16": "bf16", "lora": "lora",
    "qlora": "qlora", "adamw-8bit": "8-bit", "muon": "muon", "offload": "offl", "replicas": "repl",
    "tensor parallel": "tp", "comm memory": "mem",
}  # fmt: skip
"""What a column of marks is headed by."""
_LEGEND = """\
x: has the axis: inference; microbatches; activation checkpointing; bf16 over fp32 masters; LoRA; LoRA on NF4 bases;
AdamW with 8-bit state; Muon; offloading to the host; replicas (hybrid sharding); tensor parallelism;
memory of the process group, or symmetric memory, for collectives"""


def lines(kind: str) -> str:
    """What there is of one kind, a line each.

    Raises:
        SpecError: there is no such kind.
    """
    if kind not in _KINDS:
        raise SpecError(f"list: nothing is called '{kind}'; {nearest(kind, list(_KINDS))}")
    return _KINDS[kind]()


def strategies(*, cuda: bool) -> str:
    """Every strategy: what it is, whether it can run where there are GPUs or none, and which axes it has."""
    why = {name: row.unavailable(cuda=cuda) for name, row in ROWS.items()}
    rows = [
        [name, row.about, "unsupported" if why[name] else "available", _marks(row.axes)] for name, row in ROWS.items()
    ]
    table = tabulate(rows, headers=["strategy", "is", "here", " ".join(_HEADS.values())], disable_numparse=True)
    reasons = [f"{name}: unsupported: {reason}" for name, reason in why.items() if reason]
    reasons += [f"under any strategy: unsupported: {reason}" for reason in axes_unavailable(_HEADS)]
    return "\n".join([table, "", _LEGEND, *(["", *reasons] if reasons else ())])


def _marks(axes: frozenset[Axis]) -> str:
    return " ".join(("x" if axis in axes else "-").ljust(len(head)) for axis, head in _HEADS.items())


def _strategies_here() -> str:
    import torch

    return strategies(cuda=torch.cuda.is_available())


_KINDS: dict[str, Callable[[], str]] = {
    "strategies": _strategies_here,
    "models": lambda: "\n".join(resources.model_profiles()),
    "modes": lambda: "\n".join(MODES),
    "suites": lambda: "\n".join(resources.suites()),
    "clusters": lambda: "\n".join(resources.cluster_profiles()),
    "hardware": lambda: "\n".join(resources.hardware_profiles()),
}

assert set(_HEADS) == set(get_args(Axis))
