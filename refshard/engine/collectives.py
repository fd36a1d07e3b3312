"""The collectives that the engine issues, behind one interface.

Only this file chooses between torch's old and new names of flat collectives, and between algorithms per library.
"""

import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from refshard.engine.comm_memory import CommMemory, allocate, backend_of, has_group_memory, require_memory
from refshard.errors import EngineError

COMMUNICATED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""The dtypes that libraries know; elements of others are sent as bytes."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Make its result usable by the caller (on CUDA: by the current stream)."""


class Axis(Protocol):
    """The ranks that hold the parts of a tensor, of which there are ``world_size``."""

    @property
    def world_size(self) -> int:
        """How many they are."""

    def reduce_over_shards(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """Replace the small ``tensor`` by its sum or maximum over them, synchronously."""


class Collectives(ABC):
    """Collectives of flat 1-D tensors over a shard axis of ``world_size`` ranks times a replicate axis of ``replicas``.

    ``rank`` is this rank's place on the shard axis, and ``device`` has what the ranks tell each other. The calls that
    return a :class:`Pending` return at once, and the tensors must not be touched before its ``wait``. Multiply
    gradients by ``scale`` before a reduction: its result is then their mean.
    """

    rank: int
    world_size: int
    replicas: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def scale(self) -> float:
        """1 where reductions average by themselves; where they add up, one over the number of ranks."""
        return 1 / (self.world_size * self.replicas)

    @property
    def world_rank(self) -> int:
        """Global rank of this process: clearer in error messages than its ranks on the two axes."""
        return dist.get_rank() if dist.is_initialized() else self.rank

    @property
    def gathers(self) -> bool:
        """Whether an all-gather communicates; with one rank on the shard axis it only copies."""
        return self.world_size > 1

    @property
    def legs(self) -> int:
        """How many collectives reduce a gradient: 2 where both axes have several ranks."""
        return 2 if self.world_size > 1 and self.replicas > 1 else 1

    @abstractmethod
    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill ``output`` (world_size * n elements) with every rank's ``shard`` (n elements), in rank order.

        ``shard`` may be this rank's part of ``output`` itself.
        """

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor | None = None) -> Pending:
        """Fill ``output`` (n elements) with the sum over ranks, or the mean, of this rank's part of ``full``
        (world_size * n).

        ``output`` may be this rank's part of ``full`` itself. With one rank on the shard axis, this reduces over
        replicas instead. ``scratch`` are :meth:`scratch_numel` elements that may be written to; without it, they are
        allocated.
        """

    def scratch_numel(self, numel: int) -> int:
        """How many elements a reduce-scatter of ``numel`` needs in addition to its input and its output."""
        return 0

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Replace ``tensor`` by its sum, or its mean, over the replicate axis."""

    def mean_over_replicas(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, replaced by its mean over the replicate axis, synchronously."""
        if self.scale != 1:  # else the all-reduce averages by itself
            tensor /= self.replicas
        self.all_reduce(tensor).wait()
        return tensor

    @abstractmethod
    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """Send the next ``sent[r]`` elements of ``given`` to each rank r of the shard axis, in rank order, and fill
        ``output`` with the ``received[r]`` elements that each rank r sends here.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` with that of the first rank of both axes, synchronously."""

    @abstractmethod
    def reduce_over_shards(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """Replace the small ``tensor`` by its sum or maximum over the shard axis, synchronously."""

    @abstractmethod
    def all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        """Replace the small ``tensor`` by its maximum over all ranks of both axes."""

    def agree(self, value: int) -> bool:
        """Whether every rank of both axes calls this with the same ``value`` (at most 32 bits), synchronously."""
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        try:
            self.all_reduce_max(extremes).wait()
        except RuntimeError as error:
            raise failed(error, "all_reduce that checks agreement", self.world_rank) from error
        most, least = extremes.tolist()
        return bool(most == -least)

    def gather_ranges(self, part: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The whole of a 1-D tensor on ``part``'s device; each rank of the shard axis gives its range (``part``).

        Synchronous. Ranges are ``[start, stop)`` in rank order, follow each other without a gap, and may be empty.
        """
        longest = max(stop - start for start, stop in ranges)
        if self.world_size == 1 or not longest:
            return part.clone()
        padded = part.new_zeros(longest)
        padded[: part.numel()] = part
        gathered = part.new_empty(self.world_size * longest)
        self.all_gather(gathered, padded).wait()
        return torch.cat([row[: stop - start] for row, (start, stop) in zip(gathered.split(longest), ranges)])

    def gather_objects(self, value: object) -> list[Any]:
        """What every rank of the shard axis gives, in rank order, pickled on the way. Synchronous."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = torch.zeros(self.world_size, dtype=torch.int64)
        lengths[self.rank] = own.numel()
        self.reduce_over_shards(lengths, "sum")
        bounds = [0, *lengths.cumsum(0).tolist()]
        everything = self.gather_ranges(own, list(pairwise(bounds))).numpy().tobytes()
        return [pickle.loads(everything[start:stop]) for start, stop in pairwise(bounds)]

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device, reduced: bool = False) -> torch.Tensor:
        """An uninitialised 1-D tensor to communicate through for good: to gather to, or to be ``reduced`` from."""
        return torch.empty(numel, dtype=dtype, device=device)


class GroupCollectives(Collectives):
    """Collectives of process groups: of the shard axis, of the replicate axis, and of the shard axis again for
    reduce-scatters, so that a gather that was issued later need not queue behind them.

    An axis of one rank needs no group: None stands for it, and a group of one is as good as none. With
    ``groups_of_one`` it is kept and every collective is issued, so that one GPU suffices to test the calls to NCCL.
    ``memory`` is what :meth:`allocate` gives, for gradients too if ``gradients_kept``.

    Raises:
        UnsupportedError: a group cannot communicate through ``memory``.
    """

    def __init__(
        self,
        shards: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None = None,
        *,
        reducing: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        memory: CommMemory = "default",
        gradients_kept: bool = False,
        groups_of_one: bool = False,
    ) -> None:
        fewest = 1 if groups_of_one else 2
        shards = shards if shards and shards.size() >= fewest else None
        replicas = replicas if replicas and replicas.size() >= fewest else None
        self._shards, self._replicas = shards, replicas
        self._reducing = reducing or shards
        self.device = device or torch.device("cpu")
        self._memory = memory
        for group in dict.fromkeys((shards, self._reducing) if shards else (replicas,)):
            require_memory(memory, group, self.device)
        self.rank = shards.rank() if shards else 0
        self.world_size = shards.size() if shards else 1
        self.replicas = replicas.size() if replicas else 1
        libraries = {library_of(group, self.device) for group in (shards, replicas) if group is not None}
        self._by_parts = "gloo" in libraries and self.world_size > 1
        # NCCL launches on the current stream, of high priority here, unless a handle is requested: then it hops to a
        # stream of its own, of ordinary priority, and back. A CPU that plays a part of a cluster has but handles.
        self._handles = "nccl" not in libraries or self.device.type == "cpu"
        self._gather = None if shards is None else all_gather_call(shards, handles=self._handles)
        # NCCL averages inside its kernel, and scales before it sums, so that nothing overflows; torch's fake backend
        # stands for it. But in NVLink's switches, which its own memory is reduced in, it only sums; and it does not
        # average over a single rank.
        own_memory = gradients_kept and memory != "allocator"
        user = self._reducing or replicas
        switches = own_memory and user is not None and has_group_memory(user, self.device)
        averages = libraries in ({"nccl"}, {"fake"}) and self.world_size * self.replicas > 1 and not switches
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._scatter = (
            None if self._reducing is None else reduce_scatter_call(self._reducing, self._op, handles=self._handles)
        )

    @property
    def scale(self) -> float:
        return 1.0 if self._op == dist.ReduceOp.AVG else super().scale

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        output, shard = _known(output), _known(shard)
        if self._gather is not None and not self._by_parts:
            return self._gather(output, shard)
        own = output[self.rank * shard.numel() : (self.rank + 1) * shard.numel()]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        # Gloo's own all-gather goes through a temporary of the whole output; exchanges receive in place.
        return Together(
            tuple(
                piece
                for step in range(1, self.world_size)
                for piece in _exchange(own, output[self._part(-step, own.numel())], step, self._shards)
            )
        )

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor | None = None) -> Pending:
        if self._shards is None:
            if output.data_ptr() != full.data_ptr():
                output.copy_(full)
            return self.all_reduce(output)
        if self._scatter is not None and not self._by_parts:
            return self._scatter(output, full)
        # Gloo runs a reduce-scatter as an all-reduce of the whole input: exchanging the parts and summing them here
        # moves half the bytes (trap 10).
        numel = output.numel()
        received = (full.new_empty(self.scratch_numel(full.numel())) if scratch is None else scratch).view(-1, numel)
        exchanges = tuple(
            piece
            for step in range(1, self.world_size)
            for piece in _exchange(full[self._part(step, numel)], received[step - 1], step, self._reducing)
        )
        return _LocalSum(exchanges, full[self._part(0, numel)], received, output)

    def scratch_numel(self, numel: int) -> int:
        """See :meth:`Collectives.scratch_numel`: over gloo, what the other ranks send."""
        return numel - numel // self.world_size if self._by_parts else 0

    def _part(self, step: int, numel: int) -> slice:
        """Where the part of ``numel`` elements of the rank ``step`` places on lies in a flat tensor."""
        rank = (self.rank + step) % self.world_size
        return slice(rank * numel, (rank + 1) * numel)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        if self._replicas is None:
            return _LAUNCHED
        return dist.all_reduce(tensor, op=self._op, group=self._replicas, async_op=self._handles) or _LAUNCHED

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """See :meth:`Collectives.all_to_all`. It has a handle with NCCL too: no lane of the engine's is under way."""
        if self._shards is None:
            output.copy_(given)
            return _LAUNCHED
        work: Pending = dist.all_to_all_single(
            output, given, list(received), list(sent), group=self._shards, async_op=True
        )
        return work

    def broadcast(self, tensor: torch.Tensor) -> None:
        for group in (self._replicas, self._shards):
            if group is not None:
                with self._told("broadcast of the first rank's weights"):
                    dist.broadcast(_known(tensor), group_src=0, group=group)

    def reduce_over_shards(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        if self._shards is not None:
            there = tensor.to(self.device)  # offloaded gradients are on the CPU, the group may not be
            with self._told("all_reduce of a norm"):
                dist.all_reduce(there, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self._shards)
            tensor.copy_(there)

    def gather_ranges(self, part: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """See :meth:`Collectives.gather_ranges`: each rank that holds something sends that, and no padding."""
        if self._shards is None:
            return part.clone()
        whole = torch.empty(max(stop for _, stop in ranges), dtype=part.dtype, device=self.device)
        whole[slice(*ranges[self.rank])].copy_(part)
        with self._told("broadcast of parts of a parameter"):
            for rank, (start, stop) in enumerate(ranges):
                if stop > start:
                    dist.broadcast(_known(whole[start:stop]), group_src=rank, group=self._shards)
        return whole.to(part.device)

    def all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        work: Pending = _LAUNCHED
        for group in (self._reducing, self._replicas):
            if group is not None:
                work.wait()
                issued = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=self._handles)
                work = issued or _LAUNCHED
        return work

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Name a synchronous collective that fails; the executor does so for the collectives of a unit."""
        try:
            yield
        except RuntimeError as error:
            raise failed(error, what, self.world_rank) from error

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device, reduced: bool = False) -> torch.Tensor:
        """See :meth:`Collectives.allocate`: in the kind of memory that this group's collectives need."""
        group = self.user_of(reduced=reduced)
        return allocate(self._memory, numel, dtype=dtype, device=device, group=group)

    def user_of(self, *, reduced: bool) -> dist.ProcessGroup | None:
        """The group that gathers to a slot, or the first one that reduces it if ``reduced``; None without a group."""
        return (self._reducing or self._replicas) if reduced else self._shards


_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def group_beside(parent: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A second process group of ``ranks``, with the backend and timeout of ``parent``: the same for all models, and
    ended with all other groups.

    One for each model could not be destroyed with it. Ranks collect a model at different times, and torch names a group
    by its ranks and by how many groups there are: the next one would have another name on each rank, or find an old
    one's addresses in the store.
    """
    groups = _BESIDE.setdefault(parent, {})
    key = tuple(ranks)
    if key not in groups:
        groups[key] = dist.new_group(
            list(ranks),
            timeout=_timeout_of(parent),
            backend=dist.get_backend_config(parent),  # a mesh's may differ from the default group's
            use_local_synchronization=True,
        )
    return groups[key]


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of ``group`` may take; None where no backend of it says."""
    for device in group._device_types:
        found: timedelta | None = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if found is not None:
            return found
    return None


def failed(error: RuntimeError, what: str, rank: int) -> Exception:
    """What to raise for the ``error`` of a collective: it says ``what`` the collective was, and on which rank.

    Where there was no memory, in whichever allocator, it is torch's ``OutOfMemoryError``: harnesses go by the type.
    """
    text = str(error).lower()
    message = f"{what} failed on rank {rank}"
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _OF_NO_MEMORY):
        return torch.OutOfMemoryError(f"{message}: {error}")
    lost = isinstance(error, dist.DistError) or any(word in text for word in _OF_A_LOST_RANK)
    return EngineError(f"{message}{'; another rank has probably ended' if lost else ''}: {error}")


_OF_NO_MEMORY = ("out of memory", "can't allocate memory", "_status_alloc_failed")
"""What the message holds where CUDA or NCCL, the CPU's allocator, or one of CUDA's libraries found no memory."""
_OF_A_LOST_RANK = ("connection", "socket", "timed out", "timeout", "broken pipe", "peer", "remote")
"""What torch's message holds where the other end of a connection is gone."""


def library_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The library that serves tensors on ``device``, by which algorithms are chosen.

    It is the backend; of the backend ``emulated``, which plays a library's part, the one that the group is named after.
    """
    backend = backend_of(group, device)
    return group.name() if backend == "emulated" else backend


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes, as libraries take it."""
    return tensor if tensor.dtype in COMMUNICATED else tensor.view(torch.uint8)


_PIECE_BYTES = 2**20


def piece_length(numel: int, itemsize: int) -> int:
    """Elements in a piece (the last one may have fewer) of an exchange over gloo of ``numel`` elements.

    Both sides of one large exchange start by sending, and over a real link each direction then stalls for part of the
    time (5.5 MB at 2 Gbit/s: 31 ms where 22 are needed). Pieces of about 1 MiB, several at a time, keep both busy.
    """
    pieces = max(1, round(numel * itemsize / _PIECE_BYTES))
    return max(1, -(-numel // pieces))


def exchange_bytes(numel: int, itemsize: int, world_size: int) -> list[int]:
    """Bytes of each call of an exchange over gloo of ``numel`` elements with each other rank."""
    length = piece_length(numel, itemsize)
    return [itemsize * min(length, numel - at) for at in range(0, numel, length)] * (world_size - 1)


def _exchange(
    send: torch.Tensor, receive: torch.Tensor, step: int, group: dist.ProcessGroup | None
) -> Iterator[Pending]:
    """Over gloo, send to the rank ``step`` places on and receive as many elements from the rank as far back."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    source, target = (rank - step) % size, (rank + step) % size
    length = piece_length(send.numel(), send.element_size())
    for sent, received in zip(send.split(length), receive.split(length)):
        counts = [[sent.numel() * (other == peer) for other in range(size)] for peer in (source, target)]
        work: Pending = dist.all_to_all_single(received, sent, counts[0], counts[1], group=group, async_op=True)
        yield work


class _Call:
    """A flat collective of a group. The wrappers in ``torch.distributed`` would add their checks to each call."""

    def __init__(self, method: Callable[..., Pending | None], options: Any, *, handles: bool) -> None:
        self._method, self._options, self._handles = method, options, handles
        options.asyncOp = handles

    def __call__(self, output: torch.Tensor, given: torch.Tensor) -> Pending:
        if output.is_complex():  # which NCCL does not know
            output, given = torch.view_as_real(output), torch.view_as_real(given)
        work = self._method(output, given, self._options)
        if work is None:
            return _LAUNCHED
        if not self._handles:
            work.wait()
            return _LAUNCHED
        return work


# torch 2.13 deprecates the names on the right, torch 2.11 lacks those on the left.
def all_gather_call(group: dist.ProcessGroup, *, handles: bool) -> _Call:
    """The backend's own flat all-gather of ``group``; with ``handles`` it returns before it is done."""
    method = getattr(group, "all_gather_single", None) or group._allgather_base
    return _Call(method, AllgatherOptions(), handles=handles)


def reduce_scatter_call(group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, *, handles: bool) -> _Call:
    """The backend's own flat reduce-scatter of ``group``; with ``handles`` it returns before it is done."""
    method = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(op)
    return _Call(method, options, handles=handles)


@dataclass(frozen=True, slots=True)
class Together:
    """Several collectives, awaited as one."""

    works: tuple[Pending, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_LAUNCHED = Together(())
"""A collective that the current stream itself runs, or that there is no need of: nothing to await."""


@dataclass(slots=True)
class _LocalSum:
    """Exchanges of parts, which are summed when they are awaited. ``own`` and ``output`` may be the same memory."""

    exchanges: tuple[Pending, ...]
    own: torch.Tensor
    received: torch.Tensor
    output: torch.Tensor

    def wait(self) -> None:
        for work in self.exchanges:
            work.wait()
        total = self.own
        for part in self.received:
            total = torch.add(total, part, out=self.output)
