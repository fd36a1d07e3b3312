"""Races between lanes, found on a CPU from what happens before what.

The engine's lanes run over *logical* streams: each is a timeline that knows, by a vector clock, how far every other had
come when it was last made to wait for it. A dispatch mode sees every op of model, engine and optimizer alike and notes
what memory it reads and writes, on the stream that is current; collectives note theirs on a timeline of their process
group. Two accesses to the same memory, one of them a write, that no chain of events and waits puts in order are a race:
on a GPU their order would be luck.

Memory follows CUDA's caching allocator. What the host frees goes back to the stream that it was allocated on, at once,
and may be handed out again there; new memory therefore carries what was done to any that the stream got back. The host
is a timeline too: all that is launched comes after what the host did before, the host waits for nobody unless it is
told to, and masters in its own memory are updated by its time.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refshard.engine.collectives import Collectives, Pending
from refshard.engine.device import Lane, Lanes, StreamLanes
from refshard.engine.local_part import local_of

Clock = dict[str, int]
"""How many things of each timeline are known to be over."""
END = sys.maxsize


@dataclass(frozen=True, slots=True)
class Access:
    """The ``moment``-th thing that ``timeline`` did: it touched bytes [start, stop) of some memory."""

    what: str
    timeline: str
    moment: int
    start: int
    stop: int
    writes: bool

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.writes else 'reads'}, on {self.timeline})"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes that nothing puts in order."""

    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"{self.earlier} and {self.later}"


@dataclass(slots=True)
class Memory:
    """One storage: the stream that it was allocated on, and what was done to it that may still matter."""

    ref: StorageWeakRef
    home: str
    nbytes: int
    accesses: list[Access] = field(default_factory=list)
    on_host: bool = False


class Point:
    """An event. Recording it again leaves alone who waited for it before."""

    def __init__(self, detector: "RaceDetector") -> None:
        self._detector = detector
        self.clock: Clock = {}

    def synchronize(self) -> None:
        """Let the host wait."""
        self._detector.join("host", self.clock)


@dataclass(frozen=True, slots=True)
class LogicalStream:
    """A timeline, as lanes see it."""

    detector: "RaceDetector"
    name: str

    def record_event(self, event: Any = None) -> Point:
        point: Point = event or Point(self.detector)
        point.clock = dict(self.detector.clock(self.name))
        self.detector.look()
        return point

    def wait_event(self, event: Any) -> None:
        self.detector.join(self.name, event.clock)


class RaceDetector(TorchDispatchMode):
    """Watches all ops while it is entered; ``races`` is what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[Race] = []
        self._clocks: dict[str, Clock] = {}
        self._current = ["compute"]
        self._memories: dict[int, Memory] = {}
        self._given_back: dict[str, dict[str, Access]] = {}
        self._paused = False

    def lanes(self, streams: int) -> Lanes:
        """The engine's own lanes, over logical streams."""
        kinds: tuple[Lane, ...] = ("gather", "reduce", "combine")
        own = {kind: LogicalStream(self, kind if streams > 1 else "gather") for kind in kinds}
        return StreamLanes(own, current=lambda: LogicalStream(self, self.current), use=self._use)

    @property
    def current(self) -> str:
        """The current stream's name."""
        return self._current[-1]

    def clock(self, timeline: str) -> Clock:
        """What ``timeline`` knows."""
        return self._clocks.setdefault(timeline, {timeline: 0})

    def join(self, timeline: str, known: Clock) -> None:
        """Let ``timeline`` go on only after all of ``known``."""
        mine = self.clock(timeline)
        for name, moment in known.items():
            mine[name] = max(mine.get(name, 0), moment)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within is not the program's."""
        self._paused = True
        yield
        self._paused = False

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """From now on ``tensor`` is in the host's memory, and what is done to it alone is done by the host."""
        memory = self._memory(tensor.untyped_storage())
        memory.on_host, memory.accesses = True, []

    def launch(self, timeline: str, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Note what ``timeline`` does next."""
        if timeline != "host":
            self.join(timeline, self.clock("host"))
        self.clock(timeline)[timeline] += 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._touch(tensor, timeline, what, writing)

    def look(self) -> None:
        """Notice storage that has come, gone or been resized since; no op tells."""
        for key, memory in list(self._memories.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(key)
            self._settle(memory, storage.nbytes() if storage is not None else 0)
            if storage is None:
                del self._memories[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._paused and not func.is_view:
            self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        for argument in func._schema.arguments:
            writing = argument.alias_info is not None and argument.alias_info.is_write
            (writes if writing else reads).extend(_tensors(given.get(argument.name)))
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        made = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in known]
        on_host = [self._memory(tensor.untyped_storage()).on_host for tensor in (*reads, *writes) if tensor.numel()]
        timeline = "host" if on_host and all(on_host) else self.current
        for tensor in made:
            self._allocate(tensor.untyped_storage(), on_host=timeline == "host")
        name = func._schema.name.removeprefix("aten::")
        self.launch(timeline, name, reads, writes + ([] if "empty" in name else made))
        blocking = any(on_host) and not given.get("non_blocking", False)
        if timeline != "host" and (blocking or name == "_local_scalar_dense"):
            self.join("host", self.clock(timeline))

    @contextmanager
    def _use(self, stream: LogicalStream) -> Iterator[None]:
        self.look()
        self._current.append(stream.name)
        try:
            yield
        finally:
            self.look()
            self._current.pop()

    def _touch(self, tensor: torch.Tensor, timeline: str, what: str, writes: bool) -> None:
        if not tensor.numel() or not tensor.untyped_storage().nbytes():
            return
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        start = int(tensor.storage_offset()) * tensor.itemsize
        stop, clock = start + extent * tensor.itemsize, self.clock(timeline)
        mine = Access(what, timeline, clock[timeline], start, stop, writes)
        memory, kept = self._memory(tensor.untyped_storage()), []
        for other in memory.accesses:
            overlap = other.start < stop and start < other.stop
            if overlap and (writes or other.writes) and clock.get(other.timeline, 0) < other.moment:
                self.races.append(Race(other, mine))
            covered = start <= other.start and other.stop <= stop
            if not (covered and (writes or (not other.writes and other.timeline == timeline))):
                kept.append(other)
        memory.accesses = [*kept, mine]

    def _memory(self, storage: torch.UntypedStorage) -> Memory:
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = Memory(StorageWeakRef(storage), "compute", storage.nbytes())
            self._memories[storage._cdata] = memory
        self._settle(memory, storage.nbytes())
        return memory

    def _allocate(self, storage: torch.UntypedStorage, *, on_host: bool) -> None:
        self.look()
        memory = Memory(StorageWeakRef(storage), self.current, storage.nbytes(), on_host=on_host)
        memory.accesses = [] if on_host else self._left_behind()
        self._memories[storage._cdata] = memory

    def _settle(self, memory: Memory, nbytes: int) -> None:
        """Bring ``memory`` up to date with a storage of now ``nbytes``: given back, or allocated on this stream."""
        if memory.nbytes and not nbytes:
            left = self._given_back.setdefault(memory.home, {})
            for access in memory.accesses:
                if access.timeline not in left or left[access.timeline].moment < access.moment:
                    left[access.timeline] = access
            memory.accesses = []
        elif nbytes and not memory.nbytes:
            memory.home, memory.accesses = self.current, self._left_behind()
        memory.nbytes = nbytes

    def _left_behind(self) -> list[Access]:
        """What may have been done to memory that this stream allocates now: all that it did itself, and what others
        did to the memory that it got back.
        """
        others = self._given_back.get(self.current, {}).values()
        here = Access(
            "an earlier use of the memory", self.current, self.clock(self.current)[self.current], 0, END, True
        )
        return [here, *(Access(f"{a.what}, in freed memory", a.timeline, a.moment, 0, END, True) for a in others)]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [local_of(value)]
    return [local_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class WatchedWork:
    """A collective on its process group's timeline; awaiting it orders the current stream, not the host."""

    detector: RaceDetector
    clock: Clock

    def wait(self) -> None:
        self.detector.join(self.detector.current, self.clock)


class AlikeCollectives(Collectives):
    """One rank of a world in which all ranks are alike: every other one has the same shards and the same gradients."""

    rank = 0

    def __init__(self, *, world_size: int = 2, replicas: int = 1) -> None:
        self.world_size = world_size
        self.replicas = replicas

    @abstractmethod
    def _launch(
        self, op: str, reads: list[torch.Tensor], writes: list[torch.Tensor], move: Callable[[], object]
    ) -> Pending:
        """Start the collective ``op``, of which ``move`` is the work."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._launch("all_gather", [shard], [output], lambda: output.copy_(shard.repeat(self.world_size)))

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor | None = None) -> Pending:
        axis = self.world_size if self.world_size > 1 else self.replicas
        return self._launch("reduce_scatter", [full], [output], lambda: output.copy_(full[: output.numel()] * axis))

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._launch("all_reduce", [], [tensor], lambda: tensor.mul_(self.replicas))

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        return self._launch("all_to_all", [given], [output], output.zero_)  # what other ranks would send is not known

    def broadcast(self, tensor: torch.Tensor) -> None:
        """All ranks are alike."""

    def reduce_over_shards(self, tensor: torch.Tensor, op: str) -> None:
        """All ranks are alike."""

    def all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        return self._launch("all_reduce_max", [tensor], [tensor], lambda: None)

    def agree(self, value: int) -> bool:
        return True


class WatchedCollectives(AlikeCollectives):
    """Each process group is a timeline of its own, as NCCL's streams are."""

    def __init__(self, detector: RaceDetector, *, world_size: int = 2, replicas: int = 1, streams: int = 2) -> None:
        super().__init__(world_size=world_size, replicas=replicas)
        self._detector = detector
        self._groups = {
            "reduce_scatter": "group for reduce-scatters" if streams > 1 else "group of the shard axis",
            "all_reduce": "group of the replicate axis",
        }

    def _launch(
        self, op: str, reads: list[torch.Tensor], writes: list[torch.Tensor], move: Callable[[], object]
    ) -> Pending:
        group = self._groups.get(op, "group of the shard axis")
        with self._detector.paused():
            move()
        self._detector.join(group, self._detector.clock(self._detector.current))
        self._detector.launch(group, op, reads, writes)
        return WatchedWork(self._detector, dict(self._detector.clock(group)))


WAITS = (
    "masters_changed", "_gather", "_wait", "_reduce", "_combine", "_finish", "claim_gradients",
    "abandon_pass", "settle",
)  # fmt: skip
"""Every place that waits, by the name of the function."""
LANES_WAITS = ("issued", "follow")
"""Those of a lane other than compute for a collective: its own, and another lane's."""


class DroppingLanes(Lanes):
    """Passes everything on, but leaves out the waits of one place."""

    def __init__(self, inner: Lanes, dropped: str) -> None:
        assert dropped in WAITS + LANES_WAITS
        self._inner, self._dropped = inner, dropped

    def use(self, lane: Lane) -> AbstractContextManager[object]:
        return self._inner.use(lane)

    def computes(self) -> None:
        self._inner.computes()

    def join(self) -> None:
        self._inner.join()

    def fork(self) -> None:
        self._inner.fork()

    def alone(self) -> None:
        self._inner.alone()

    def record(self, lane: Lane, reuse: object = None) -> object:
        return self._inner.record(lane, reuse)

    def wait(self, lane: Lane, event: object) -> None:
        if self.keeps():
            self._inner.wait(lane, event)

    def issued(self, lane: Lane, pending: Pending) -> Pending:
        return _Droppable(self, self._inner.issued(lane, _NotAwaited() if self._dropped == "issued" else pending))

    def follow(self, lane: Lane, pending: Pending) -> None:
        assert isinstance(pending, _Droppable)
        if self._dropped != "follow":
            self._inner.follow(lane, pending.pending)

    def synchronise(self, event: object) -> None:
        if self.keeps():
            self._inner.synchronise(event)

    def keeps(self) -> bool:
        """Whether the innermost place that waits, of those now running, is another than the dropped one."""
        frame = sys._getframe(1)
        while frame.f_code.co_name not in WAITS:
            assert frame.f_back is not None, "a wait from a place that WAITS does not list"
            frame = frame.f_back
        return frame.f_code.co_name != self._dropped


@dataclass(frozen=True, slots=True)
class _Droppable:
    lanes: DroppingLanes
    pending: Pending

    def wait(self) -> None:
        if self.lanes.keeps():
            self.pending.wait()


class _NotAwaited:
    def wait(self) -> None:
        """Leave the collective alone."""
