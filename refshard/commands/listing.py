"""``refshard list``: the names that suites may use."""

from collections.abc import Callable

from refshard import resources, strategies
from refshard.errors import SpecError, nearest
from refshard.plan.placement import MODES

_KINDS: dict[str, Callable[[], list[str]]] = {
    "strategies": lambda: list(strategies.names()),
    "models": lambda: list(resources.model_profiles()),
    "modes": lambda: list(MODES),
    "suites": lambda: list(resources.suites()),
    "clusters": lambda: list(resources.cluster_profiles()),
    "hardware": lambda: list(resources.hardware_profiles()),
}


def names(kind: str) -> list[str]:
    """The names of one kind.

    Raises:
        SpecError: there is no such kind.
    """
    if kind not in _KINDS:
        raise SpecError(f"list: nothing is called '{kind}'; {nearest(kind, list(_KINDS))}")
    return _KINDS[kind]()
