"""The strategies that can be compared, by name. The file of a strategy imports torch, so it is loaded when needed."""

from importlib import import_module
from typing import TYPE_CHECKING

from refshard.errors import SpecError, UnsupportedError, nearest
from refshard.specs.case import Case
from refshard.strategies.table import ROWS, axes_of, axes_unavailable, not_composed, not_dry_run, not_with_own

if TYPE_CHECKING:
    from refshard.strategies.base import Strategy


def check_name(name: str) -> None:
    """Check that a strategy exists, without importing torch.

    Raises:
        SpecError: unknown name.
    """
    if name not in ROWS:
        raise SpecError(f"strategy: no strategy '{name}'; {nearest(name, list(ROWS))}")


def make_strategy(name: str) -> "Strategy":
    """A fresh strategy of this name.

    Raises:
        SpecError: unknown name.
    """
    check_name(name)
    module, _, class_name = ROWS[name].code.partition(".")
    strategy: Strategy = getattr(import_module(f"refshard.strategies.{module}"), class_name)(**ROWS[name].arguments)
    return strategy


def strategy_for(case: Case, *, cuda: bool) -> "Strategy":
    """The strategy of ``case``, after :func:`check_case`; ``cuda`` says whether ranks have a GPU each."""
    check_case(case, cuda=cuda)
    return make_strategy(case.job.strategy)


def check_case(case: Case, *, cuda: bool) -> None:
    """Check that the strategy of ``case`` can run it, without importing torch.

    Raises:
        SpecError: there is no such strategy.
        UnsupportedError: it cannot run here, or does not support an option of the case, or a package is missing.
    """
    job = case.job
    check_name(job.strategy)
    row = ROWS[job.strategy]
    if why := row.unavailable(cuda=cuda):
        raise UnsupportedError(f"{job.strategy} {why}")
    if lacking := row.lacking(case):
        raise UnsupportedError(f"refshard does not support {job.strategy} with {lacking}; see refshard list strategies")
    if why := not_with_own(case) or not_composed(case):
        raise UnsupportedError(why)
    if case.protocol.fidelity == "dryrun" and (why := not_dry_run(case)):
        raise UnsupportedError(why)
    if absent := axes_unavailable(sorted(axes_of(case))):
        raise UnsupportedError("; ".join(absent))
