"""A case, as data: one way of treating a model, and what may come of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from refshard.engine.placement import MODES
from tests.distributed.cases.sides import Side, Variant

Kind = Literal["right", "refused", "obscure", "wrong", "race", "crash", "hang"]
"""What came of a run: equal to unsharded training; an error of refshard's own; any other exception; other values;
accesses to device memory that no stream orders; death by a signal; no end.
"""

PLAIN = (Variant(),)
EVALUATED = (*PLAIN, Variant(evaluated=True))
CHECKPOINTED = (*PLAIN, Variant(checkpointed=True))
ALL = (*EVALUATED, Variant(checkpointed=True), Variant(evaluated=True, checkpointed=True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of treating a model.

    ``run`` builds a model, has the side shard it, trains and logs what it sees. The result must be ``right`` in every
    mode. Where ``refuses`` has words for a mode, an error of refshard's own that matches them is as good.

    ``or_torch`` matches an error that torch itself raises before the engine could know, and that names the cause.
    ``table`` says that the case stands for a row of the issues that the corpus was written for: these run in
    ``make test``. ``rtol`` is how far values may be from those of unsharded training, in fp64 as a rule.
    ``only_on_cpu`` says that the fake CUDA device lacks something: kernels that have no counterpart on the CPU, sparse
    tensors, a compiler.
    """

    name: str
    theme: str
    run: Callable[[Side], None]
    variants: tuple[Variant, ...] = ALL
    refuses: Mapping[str, str] = field(default_factory=dict)
    or_torch: str | None = None
    table: bool = False
    rtol: float = 1e-8
    modes: tuple[str, ...] = tuple(MODES)
    only_on_cpu: bool = False

    def accepts(self, way: str, kind: str, message: str) -> bool:
        """Whether a mode may end like that."""
        pattern = {"refused": self.refuses.get(way), "obscure": self.or_torch}.get(kind)
        return kind == "right" or (pattern is not None and bool(re.search(pattern, message)))


def case(
    *,
    variants: tuple[Variant, ...] = ALL,
    refuses: str | Mapping[str, str] | None = None,
    or_torch: str | None = None,
    table: bool = False,
    rtol: float = 1e-8,
    modes: tuple[str, ...] = tuple(MODES),
    only_on_cpu: bool = False,
) -> Callable[[Callable[[Side], None]], Case]:
    """Make a function a case of the same name. ``refuses`` is a pattern for all modes, or one for each that refuses."""
    patterns = dict.fromkeys(MODES, refuses) if isinstance(refuses, str) else dict(refuses or {})

    def decorate(run: Callable[[Side], None]) -> Case:
        return Case(
            name=run.__name__,
            theme=run.__module__.rpartition(".")[2],
            run=run,
            variants=variants,
            refuses=patterns,
            or_torch=or_torch,
            table=table,
            rtol=rtol,
            modes=modes,
            only_on_cpu=only_on_cpu,
        )

    return decorate
