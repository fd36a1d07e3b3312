"""All cases, by name."""

from collections.abc import Iterator
from types import ModuleType

from tests.distributed.cases import (
    accumulation,
    ahead,
    by_rank,
    calls,
    checkpointing,
    compiled,
    evaluation,
    experts,
    factors,
    failing,
    forwards,
    gradients,
    hooks,
    inputs,
    leaves,
    loops,
    losses,
    methods,
    modules,
    optimizers,
    parameters,
    policies,
    precision,
    reads,
    saving,
    subclasses,
    weights,
    writes,
)
from tests.distributed.cases.case import Case

THEMES: tuple[ModuleType, ...] = (
    calls,
    by_rank,
    methods,
    ahead,
    forwards,
    evaluation,
    reads,
    writes,
    inputs,
    hooks,
    losses,
    gradients,
    optimizers,
    accumulation,
    factors,
    checkpointing,
    leaves,
    failing,
    modules,
    parameters,
    subclasses,
    precision,
    policies,
    experts,
    weights,
    loops,
    saving,
    compiled,
)


def _cases_of(theme: ModuleType) -> Iterator[Case]:
    """Those that the module holds by themselves, or in lists."""
    for value in vars(theme).values():
        for held in value if isinstance(value, list) else [value]:
            if isinstance(held, Case):
                yield held


def _collect() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for theme in THEMES:
        for case in _cases_of(theme):
            assert case.name not in found, f"two cases are named {case.name}"
            found[case.name] = case
    return found


CASES = _collect()
