"""Recordings made by hand.

>>> made = Made(world_size=8)
>>> gather = made.group(range(8))
>>> row = made.launch("aten::mm", signature="bf16[8,8] bf16[8,8] -> bf16[8,8]", reads=256, writes=128)
>>> ready = made.record(stream=0)
>>> made.wait(stream=20, event=ready)
>>> row = made.collective("all_gather", gather, nbytes=2**20, stream=20)
>>> made.synchronise(stream=20, why="item", site="train.py:31 in train")
>>> made.mark("step")
>>> len(made.recording())
6

Each method adds one event, in the order of the host, and returns its row, or the id that later events name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from refshard.dryrun.price import NO_LINK, Prices
from refshard.dryrun.recording import BEGINS, ENDS, NO_STREAM, Category, Flag, Group, Kind, Phase, Recording

_TYPES: dict[str, type] = {
    "kinds": np.uint8, "names": np.int32, "streams": np.int64, "subjects": np.int64, "sizes": np.int64,
    "reads": np.int64, "writes": np.int64, "signatures": np.int32, "modules": np.int32, "phases": np.uint8,
    "flags": np.int32, "categories": np.uint8, "threads": np.int32, "sites": np.int32, "host_operators": np.int32,
    "host_dispatched": np.int32, "host_nodes": np.int32, "host_calls": np.int32,
}  # fmt: skip
Access = tuple[int, int, bool]
"""Address, bytes, and whether it is written."""


class Made:
    """A recording that grows by one event a call. ``phase`` and ``module`` hold for all events from then on."""

    def __init__(self, rank: int = 0, world_size: int = 8) -> None:
        self.rank, self.world_size = rank, world_size
        self.phase, self.module = Phase.OTHER, ""
        self._rows: list[dict[str, Any]] = []
        self._accesses: list[Access] = []
        self._tables: dict[str, dict[str, int]] = {t: {"": 0} for t in ("names", "signatures", "modules", "sites")}
        self._groups: dict[int, Group] = {}
        self._blocks: dict[int, int] = {}
        self._ids = 0

    def group(self, ranks: Iterable[int], name: str = "nccl") -> int:
        """A process group's id."""
        self._groups[len(self._groups) + 1] = Group(name=name, ranks=tuple(ranks))
        return len(self._groups)

    def launch(
        self, name: str = "aten::add", *, stream: int = 0, signature: str = "", reads: int = 0, writes: int = 0,
        flags: Flag | int = 0, accesses: Sequence[Access] = (), **host: int,
    ) -> int:  # fmt: skip
        """An operator; ``host`` are counts of what the host did before it (``host_calls=3``)."""
        return self._add(
            Kind.LAUNCH, name, streams=stream, signatures=signature, reads=reads, writes=writes, flags=int(flags),
            accesses=accesses, **host,
        )  # fmt: skip

    def collective(
        self, op: str, group: int, *, nbytes: int, stream: int, signature: str = "", peer: int = 0,
        accesses: Sequence[Access] = (), site: str = "", flags: int = 0,
    ) -> int:  # fmt: skip
        """A collective of ``nbytes`` of the unsharded tensor; ``peer`` is a rank in the group."""
        return self._add(
            Kind.COLLECTIVE, op, streams=stream, subjects=group | peer << 32, sizes=nbytes, signatures=signature,
            accesses=accesses, sites=site, flags=flags,
        )  # fmt: skip

    def communicator(self, group: int, nbytes: int) -> int:
        """NCCL's communicator for the group."""
        return self._add(Kind.COMMUNICATOR, "", subjects=group, sizes=nbytes)

    def record(self, stream: int, event: int = 0) -> int:
        """The id of the event, a new one unless given."""
        event = event or self._new_id()
        self._add(Kind.RECORD, "record", streams=stream, subjects=event)
        return event

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self._add(Kind.WAIT, "wait", streams=stream, subjects=event)

    def synchronise(
        self, *, stream: int = NO_STREAM, event: int = 0, why: str = "device", site: str = "", flags: int = 0
    ) -> None:
        """Let the host wait: for an event, for a stream, or for the device."""
        self._add(Kind.SYNCHRONISE, why, streams=stream, subjects=event, sites=site, flags=flags)

    def allocate(
        self, nbytes: int, category: Category = Category.OTHER, stream: int = 0, name: str = "aten::empty", *,
        address: int = 0, flags: Flag | int = 0,
    ) -> int:  # fmt: skip
        """The new block's id."""
        block = self._new_id()
        self._add(
            Kind.ALLOCATE, name, streams=stream, subjects=block, sizes=nbytes, reads=address, writes=nbytes,
            categories=int(category), flags=int(flags),
        )  # fmt: skip
        self._blocks[block] = nbytes
        return block

    def free(self, block: int) -> None:
        """Give a block back to the allocator."""
        self._add(Kind.FREE, "free", subjects=block, sizes=self._blocks.get(block, 0))

    def hold(self, block: int, stream: int) -> None:
        """``record_stream()``: another stream uses the block."""
        self._add(Kind.HOLD, "hold", streams=stream, subjects=block)

    def segment(self, nbytes: int) -> None:
        """Memory that the allocator takes from the device, or gives back."""
        self._add(Kind.SEGMENT, "segment", sizes=nbytes)

    def mark(self, says: str = "step") -> None:
        """A boundary."""
        self._add(Kind.MARK, says)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A range of the script's."""
        self.mark(BEGINS + name)
        yield
        self.mark(ENDS + name)

    def recording(self) -> Recording:
        """What was recorded so far."""
        columns: Any = {name: np.array([row[name] for row in self._rows], kind) for name, kind in _TYPES.items()}
        return Recording(
            rank=self.rank, world_size=self.world_size, **columns,
            access_ends=np.cumsum([len(row["accesses"]) for row in self._rows], dtype=np.int64),
            access_addresses=np.array([address for address, _, _ in self._accesses], np.int64),
            access_sizes=np.array([size for _, size, _ in self._accesses], np.int64),
            access_writes=np.array([writes for _, _, writes in self._accesses], np.bool_),
            name_table=tuple(self._tables["names"]), signature_table=tuple(self._tables["signatures"]),
            module_table=tuple(self._tables["modules"]), site_table=tuple(self._tables["sites"]),
            groups=dict(self._groups),
        )  # fmt: skip

    def _add(self, kind: Kind, name: str, **columns: Any) -> int:
        row: dict[str, Any] = {**dict.fromkeys(_TYPES, 0), "streams": NO_STREAM, "accesses": ()}
        row |= {"signatures": "", "sites": "", "names": name, "modules": self.module, "phases": int(self.phase)}
        row |= {"kinds": int(kind), **columns}
        for column, table in self._tables.items():
            row[column] = table.setdefault(row[column], len(table))
        self._accesses += row["accesses"]
        self._rows.append(row)
        return len(self._rows) - 1

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids


def prices(
    recording: Recording,
    seconds: Mapping[int, float],
    *,
    links: Mapping[int, int] | None = None,
    latencies: Mapping[int, float] | None = None,
    host_s: float = 0.0,
    event_s: float = 0.0,
) -> Prices:
    """Prices by row, 0 where none is given; a launch or a collective takes ``host_s`` of the host.

    Recording an event, waiting and synchronising take ``event_s`` of it.
    """
    priced, after = np.zeros(len(recording)), np.zeros(len(recording))
    priced[list(seconds)] = list(seconds.values())
    after[list(latencies or ())] = list((latencies or {}).values())
    occupied = np.full(len(recording), NO_LINK, np.int8)
    for row, link in (links or {}).items():
        occupied[row] = link
    launches = np.isin(recording.kinds, (Kind.LAUNCH, Kind.COLLECTIVE))
    events = np.isin(recording.kinds, (Kind.RECORD, Kind.WAIT, Kind.SYNCHRONISE))
    return Prices(
        seconds=priced, latencies=after, links=occupied, flops=np.zeros(len(recording)),
        host_seconds=np.where(launches, host_s, np.where(events, event_s, 0.0)),
    )  # fmt: skip


GATHERS, COPIES_IN, REDUCES = 20, 21, 22
"""Streams of :func:`sharded_step`: all-gathers, what is copied for them, and reductions."""


def sharded_step(made: Made, group: int, *, layers: int = 3, mbytes: int = 64, tokens: int = 512) -> None:
    """One step as FSDP2 issues it: forward, backward, optimizer, the loss read by the host, and a mark.

    Layers are of ``mbytes`` each in bf16, and compute one square product a parameter matrix of the same width.
    """
    nbytes, ranks = mbytes << 20, 8
    width = int((nbytes / 2) ** 0.5)
    batch, weight = f"bf16[{tokens},{width}]", f"bf16[{width},{width}]"
    read, written = nbytes + 2 * tokens * width, 2 * tokens * width
    made.phase, made.module = Phase.OTHER, ""
    made.launch("aten::copy_", flags=Flag.HOST_TO_DEVICE, reads=8 * tokens, writes=8 * tokens)
    made.launch("aten::embedding", reads=2 * tokens * width, writes=2 * tokens * width)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for number in range(layers) if phase == Phase.FORWARD else reversed(range(layers)):
            made.phase, made.module = phase, f"layers.{number}.linear"
            made.launch("aten::_foreach_copy_", stream=COPIES_IN, reads=nbytes // ranks, writes=nbytes // ranks)
            made.wait(GATHERS, made.record(COPIES_IN))
            made.collective("all_gather", group, nbytes=nbytes, stream=GATHERS, signature=f"{weight} -> {weight}")
            made.wait(0, made.record(GATHERS))
            made.launch("aten::split_with_sizes_copy", reads=nbytes, writes=nbytes)
            for _ in range(1 if phase == Phase.FORWARD else 2):
                made.launch("aten::mm", signature=f"{batch} {weight} -> {batch}", reads=read, writes=written)
            if phase == Phase.BACKWARD:
                made.wait(REDUCES, made.record(0))
                made.launch("aten::_chunk_cat", stream=REDUCES, reads=nbytes, writes=2 * nbytes)
                full = f"fp32[{width},{width}]"
                made.collective(
                    "reduce_scatter", group, nbytes=2 * nbytes, stream=REDUCES, signature=f"{full} -> {full}"
                )
                made.launch("aten::div_", stream=REDUCES, reads=2 * nbytes // ranks, writes=2 * nbytes // ranks)
    made.phase, made.module = Phase.OTHER, ""
    made.wait(0, made.record(REDUCES))
    made.collective("all_reduce", group, nbytes=4, stream=0, signature="fp32[] -> fp32[]")
    made.phase = Phase.OPTIMIZER
    made.launch("aten::_fused_adamw_", signature=" ".join(["fp32[8]"] * 4), reads=8 * nbytes // ranks, writes=0)
    made.phase = Phase.OTHER
    made.launch("aten::_local_scalar_dense", flags=Flag.DEVICE_TO_HOST, reads=4)
    made.synchronise(stream=0, why="item", site="train.py:31 in train")
    made.collective("barrier", group, nbytes=4, stream=0)
    made.mark()
