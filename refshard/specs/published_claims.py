"""Published claims: one way of training against another, in one figure.

One file per source in ``profiles/published_claims/``. Figures stand as printed.
"""

from pathlib import Path
from typing import Literal

import msgspec

from refshard import resources
from refshard.specs.published_parallel import ParallelRun
from refshard.specs.reading import convert, finite, read_toml

Figure = Literal["throughput", "step time", "memory"]
_AGREEMENT = 0.02
"""Relative difference up to which a claim and the figures of its runs agree: sources round."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim: ``ratio`` is the figure of the ``claimed`` run over that of the ``baseline``, 1.25 for 25 % more.

    Throughput is per GPU, memory the peak that the source printed. Without runs, ``missing`` says why there are none,
    and ``setting`` what the source says of them. ``cause`` says in a sentence or two why the prediction differs, and is
    empty where it does not.
    """

    name: str
    figure: Figure
    ratio: float
    claimed: ParallelRun | None = None
    baseline: ParallelRun | None = None
    missing: str = ""
    setting: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        finite("ratio", self.ratio, above=0)
        given = [side for side in (self.claimed, self.baseline) if side is not None]
        if len(given) == 1 or bool(given) == bool(self.missing.strip()):
            raise ValueError(
                "a claim must have a claimed and a baseline run, or say what is missing, got "
                f"{len(given)} of 2 runs and {self.missing!r}; complete the runs, or leave them out and say why"
            )
        if given and self.setting:
            raise ValueError(f"setting must be empty where runs are given, got {self.setting!r}; leave it out")
        if self.claimed is not None and self.baseline is not None:
            self._check(self.claimed, self.baseline)

    def _check(self, claimed: ParallelRun, baseline: ParallelRun) -> None:
        printed = [figure_of(side, self.figure) for side in (claimed, baseline)]
        if printed[0] is None or printed[1] is None:
            raise ValueError(
                f"both runs must have the claim's figure, {self.figure}, got {printed}; add what is printed"
            )
        given = printed[0] / printed[1]
        if abs(given / self.ratio - 1) > _AGREEMENT:
            raise ValueError(
                f"ratio must be what the runs' figures give, {given:.4g}, got {self.ratio:.4g}; check the source"
            )


def figure_of(run: ParallelRun, figure: Figure) -> float | None:
    """What the source printed of a run: tokens per second and GPU, seconds, or GiB."""
    if figure == "throughput":
        return run.tokens_per_s_gpu
    return run.seconds if figure == "step time" else run.reserved_gib or run.allocated_gib


class ClaimTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claims of one source, and what holds for all of them.

    ``clusters`` and ``assumed`` are those of a :class:`~refshard.specs.published_parallel.ParallelTable`.
    """

    title: str
    source: str
    settings: str = ""
    clusters: dict[str, str] = {}
    assumed: dict[str, str | int | bool] = {}
    claims: tuple[Claim, ...]

    def __post_init__(self) -> None:
        if not self.claims:
            raise ValueError("claims must hold at least one, got none; leave the file out")


def load_claims() -> dict[str, ClaimTable]:
    """Every table, by name.

    Raises:
        SpecError: a file breaks the schema, or a claim contradicts its runs.
    """
    return {name: read_claims(path) for name, path in resources.published_claims().items()}


def read_claims(path: Path) -> ClaimTable:
    """One table.

    Raises:
        SpecError: it breaks the schema, or a claim contradicts its runs.
    """
    return convert(read_toml(path), ClaimTable, where=f"claims {path.stem}")
