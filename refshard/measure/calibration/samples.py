"""What the ranks of a calibration are to measure, and what each measured, piece by piece.

A piece is one kind of measurement, such as ``bf16 products``. Each rank writes its samples after every piece. A piece
that fails holds the reason and its samples until then; later pieces are measured all the same.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar, Literal

import msgspec

from refshard.records import GpuUse
from refshard.specs.cluster import COLLECTIVES, CollectiveOp
from refshard.specs.hardware import Dtype

DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
"""In the order of their measurement: bf16 has fast kernels for everything, fp32 attention may not fit."""
OPERATIONS, ELEMENTWISE, OPTIMIZER, NEW_MEMORY = "operations", "elementwise", "optimizer", "new memory"
BESIDE = "products beside collectives"
IN_BURSTS = " in bursts"
_OF_SUBGROUPS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_reduce", "exchange")


def samples_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`RankSamples`."""
    return folder / f"samples-rank{rank}.json"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long a kernel is timed, in seconds.

    A burst lasts about ``burst_s``, after ``rest_s`` of idling, when clocks are highest. A sustained measurement goes
    on in windows of ``window_s`` until three in a row agree, or for ``most_s``: power and temperature have then brought
    the clocks down to those of training.
    """

    rest_s: float
    burst_s: float
    window_s: float
    most_s: float


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Products are (tokens, width, feed-forward width), attention (head dimension, tokens)."""

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int], ...]
    heads: int
    moved_bytes: tuple[int, ...]
    optimizer_numel: int
    operation_repeats: int


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Which collectives to measure: bytes of the unsharded tensor, and about how long each may take.

    For overlap, products of ``beside_width`` run with collectives of ``beside_bytes``.
    """

    sizes: tuple[int, ...]
    budget_s: float
    beside_width: int
    beside_bytes: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: on ``ranks`` of ``threads`` each, in ``sweeps``; and ``when`` and by which ``command``.

    One machine plays ``nodes_here`` nodes, which share its memory. A sweep measures everything once: medians over
    sweeps are robust to drift of the machine's speed and to bursts of other work. With ``cpu_clock``, computation is
    timed by its thread's CPU time, so that other work does not count; not if ranks outnumber the cores.
    """

    ranks: int
    threads: int
    device: Literal["cpu", "cuda"]
    sweeps: int
    cpu_clock: bool
    nodes_here: int = 1
    shapes: Shapes
    traffic: Traffic
    pace: Pace
    command: str
    when: str


class Operations(msgspec.Struct, frozen=True, kw_only=True, tag="operations"):
    """Seconds of the smallest kernel, and of the host to launch one."""

    times: ClassVar[tuple[str, ...]] = ("kernel_s", "host_s")
    kernel_s: float
    host_s: float


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag="kernel"):
    """A kernel that takes ``seconds``: FLOPs, bytes read and written, exponentials."""

    times: ClassVar[tuple[str, ...]] = ("seconds",)
    dtype: Dtype
    flops: float = 0.0
    bytes: float = 0.0
    transcendentals: float = 0.0
    seconds: float


class TimedAttention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Causal attention: seconds per score, as in :class:`refshard.specs.hardware.AttentionPoint`."""

    times: ClassVar[tuple[str, ...]] = ("forward_s", "backward_s")
    dtype: Dtype
    head_dim: int
    seq_len: int
    forward_s: float
    backward_s: float


class TimedCollective(msgspec.Struct, frozen=True, kw_only=True, tag="collective"):
    """One collective in one group of ``ranks`` on ``nodes``: seconds of each repeat, of all sweeps."""

    op: CollectiveOp
    ranks: int
    nodes: int
    bytes: int
    seconds: tuple[float, ...]


class Beside(msgspec.Struct, frozen=True, kw_only=True, tag="beside"):
    """The share of its own rate that each keeps while the other runs."""

    times: ClassVar[tuple[str, ...]] = ("compute", "communication")
    compute: float
    communication: float


Sample = Operations | Timed | TimedAttention | TimedCollective | Beside


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one piece, in order; ``failure`` says why some are missing."""

    samples: tuple[Sample, ...] = ()
    failure: str = ""


Pieces = dict[str, Piece]


class RankSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured so far. ``busy`` is the share of the time that it had its core, if known.

    ``machine`` is the GPU's or the processor's name, ``nodes`` the number of nodes, ``gpu_use`` how the node's GPUs ran
    during each sustained piece (the first rank of each node watches).
    """

    rank: int
    nodes: int
    machine: str
    torch: str
    backend: str
    memory_bytes: int
    multiprocessors: int = 0
    capability: tuple[int, int] = (0, 0)
    sweeps: tuple[Pieces, ...] = ()
    busy: float = 1.0
    gpu_use: dict[str, tuple[GpuUse, ...]] = {}


def groups_of(ranks: int, nodes: int) -> tuple[tuple[int, int], ...]:
    """Ranks and nodes of the groups to measure: all; and if nodes have several ranks, a node's, and one a node."""
    inside, across = (ranks // nodes, 1), (nodes, nodes)
    if ranks == 1:
        return ()
    return ((ranks, nodes),) if 1 in (nodes, ranks // nodes) else ((ranks, nodes), inside, across)


def ops_of(calibration: Calibration, ranks: int) -> tuple[CollectiveOp, ...]:
    """The collectives of a group of this size. The engine exchanges over gloo only."""
    ops = COLLECTIVES if ranks == calibration.ranks else _OF_SUBGROUPS
    return tuple(op for op in ops if op != "exchange" or calibration.device == "cpu")


def collective_piece(op: CollectiveOp, ranks: int, nodes: int) -> str:
    """The name of this collective's piece."""
    return f"{op} of {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}"


def of_sweeps(sweeps: Sequence[Pieces]) -> Pieces:
    """The sweeps of one rank as one: medians, and of collectives the repeats of all.

    For each piece, the sweeps count that measured all of it, or else the ones that got furthest.
    """
    found: Pieces = {}
    for name in dict.fromkeys(chain.from_iterable(sweeps)):
        pieces = [sweep[name] for sweep in sweeps if name in sweep]
        furthest = max(len(piece.samples) for piece in pieces)
        best = [p for p in pieces if not p.failure] or [p for p in pieces if len(p.samples) == furthest]
        samples = zip(*(piece.samples for piece in best))
        combined = tuple(_combined(same, median, lambda all_: tuple(chain.from_iterable(all_))) for same in samples)
        found[name] = Piece(samples=combined, failure=best[0].failure)
    return found


def of_ranks(ranks: Sequence[Pieces]) -> Pieces:
    """All ranks as one: means, and of collectives the slowest rank's time of each repeat.

    Only samples that all ranks have count; each rank measured them in the same order. A piece that some ranks did not
    reach is here only if it failed on another.
    """
    found: Pieces = {}
    for name in dict.fromkeys(chain.from_iterable(ranks)):
        pieces = [rank[name] for rank in ranks if name in rank]
        failures = sorted((piece.failure for piece in pieces if piece.failure), key=ELSEWHERE.__eq__)
        if len(pieces) == len(ranks):
            samples = zip(*(piece.samples for piece in pieces))
            combined = tuple(_combined(same, fmean, lambda all_: tuple(map(max, zip(*all_)))) for same in samples)
            found[name] = Piece(samples=combined, failure=failures[0] if failures else "")
        elif failures:
            found[name] = Piece(failure=failures[0])
    return found


ELSEWHERE = "it failed on another rank"
"""Why a rank that could have measured a collective did not."""
Seconds = tuple[float, ...]


def _combined(
    same: Sequence[Sample], combine: Callable[[list[float]], float], collect: Callable[[Iterable[Seconds]], Seconds]
) -> Sample:
    """One sample of several: repeats of a collective are collected, times of others combined."""
    first = same[0]
    if isinstance(first, TimedCollective):
        return msgspec.structs.replace(
            first, seconds=collect(one.seconds for one in same if isinstance(one, TimedCollective))
        )
    times = {field: combine([getattr(one, field) for one in same]) for field in first.times}
    return msgspec.structs.replace(first, **times)
