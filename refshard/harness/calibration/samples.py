"""What a calibration asks of its ranks, and what each of them measured."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from refshard.specs.cluster import CollectiveOp
from refshard.specs.hardware import AttentionPoint, Dtype

CALIBRATION_FILE = "calibration.json"


def samples_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`RankSamples`."""
    return folder / f"samples-rank{rank}.json"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: ``ranks`` of ``threads`` each on ``nodes`` nodes, thoroughly or ``quick``, in ``sweeps``.

    A sweep measures everything once. A machine's speed drifts, and a burst of other work hits what is measured just
    then: medians over sweeps, which the whole time lies between, bear both.

    With ``cpu_clock``, computation is timed by the time that its thread ran, so that other work on the machine does not
    count. Where ranks outnumber the cores, that they wait for each other does count.
    """

    ranks: int
    threads: int
    nodes: int
    device: Literal["cpu", "cuda"]
    quick: bool
    sweeps: int
    cpu_clock: bool

    @property
    def per_node(self) -> int:
        """Ranks on one node."""
        return self.ranks // self.nodes


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """Work that takes ``seconds``: FLOPs, bytes read and written, exponentials."""

    dtype: Dtype
    flops: float = 0.0
    bytes: float = 0.0
    transcendentals: float = 0.0
    seconds: float


class TimedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective in one group of ``ranks`` on ``nodes``: seconds of each repeat on this rank, of all sweeps."""

    op: CollectiveOp
    ranks: int
    nodes: int
    bytes: int
    seconds: tuple[float, ...]


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """At which part of its own rate each goes while the other runs."""

    compute: float
    communication: float


class RankSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured, in one sweep or in all. ``busy`` is the part of the time that it got its cores for, if
    that is known. ``first_touch_s_per_byte`` is 0 where new memory costs nothing more.
    """

    rank: int
    device: str
    backend: str
    memory_bytes: int
    multiprocessors: int
    kernel_s: float
    host_s: float
    products: tuple[Timed, ...]
    attention: tuple[AttentionPoint, ...]
    moves: tuple[Timed, ...]
    transcendentals: tuple[Timed, ...]
    optimizer_s_per_parameter: float
    first_touch_s_per_byte: float
    collectives: tuple[TimedCollective, ...]
    beside: Beside
    busy: float


def median_of(sweeps: Sequence[RankSamples]) -> RankSamples:
    """What one rank measured in several sweeps, each of which measured the same in the same order, as one."""
    first = sweeps[0]
    return msgspec.structs.replace(
        first,
        kernel_s=median(s.kernel_s for s in sweeps),
        host_s=median(s.host_s for s in sweeps),
        products=_median_timed(s.products for s in sweeps),
        attention=tuple(
            msgspec.structs.replace(
                same[0],
                forward_s=median(point.forward_s for point in same),
                backward_s=median(point.backward_s for point in same),
            )
            for same in zip(*(s.attention for s in sweeps))
        ),
        moves=_median_timed(s.moves for s in sweeps),
        transcendentals=_median_timed(s.transcendentals for s in sweeps),
        optimizer_s_per_parameter=median(s.optimizer_s_per_parameter for s in sweeps),
        first_touch_s_per_byte=median(s.first_touch_s_per_byte for s in sweeps),
        collectives=tuple(
            msgspec.structs.replace(same[0], seconds=tuple(chain.from_iterable(one.seconds for one in same)))
            for same in zip(*(s.collectives for s in sweeps))
        ),
        beside=Beside(
            compute=median(s.beside.compute for s in sweeps),
            communication=median(s.beside.communication for s in sweeps),
        ),
        busy=median(s.busy for s in sweeps),
    )


def _median_timed(sweeps: Iterable[Sequence[Timed]]) -> tuple[Timed, ...]:
    return tuple(msgspec.structs.replace(same[0], seconds=median(s.seconds for s in same)) for same in zip(*sweeps))
