"""What a calibration asks of its ranks, and what each of them measured."""

from pathlib import Path
from typing import Literal

import msgspec

from refshard.specs.cluster import CollectiveOp
from refshard.specs.hardware import AttentionPoint, Dtype

CALIBRATION_FILE = "calibration.json"


def samples_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`RankSamples`."""
    return folder / f"samples-rank{rank}.json"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: ``ranks`` of ``threads`` each on ``nodes`` nodes, thoroughly or ``quick``.

    With ``cpu_clock``, computation is timed by the time that its thread ran, so that other work on the machine does not
    count. Where ranks outnumber the cores, that they wait for each other does count.
    """

    ranks: int
    threads: int
    nodes: int
    device: Literal["cpu", "cuda"]
    quick: bool
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
    """One collective in one group of ``ranks`` on ``nodes``: seconds of each repeat on this rank."""

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
    """What one rank measured. ``busy`` is the part of the time that it got its cores for, if that is known."""

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
    optimizer_bytes_per_s: float
    first_touch_bytes_per_s: float
    collectives: tuple[TimedCollective, ...]
    beside: Beside
    busy: float
