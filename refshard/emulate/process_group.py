"""The c10d backend ``emulated``: a process group in Python; its collectives take the time a cluster's profile says.

torch's dispatcher, which shows a collective in a trace as an operator of c10d's, has no part in a group that is written
in Python. So each is announced here by that operator's name; what runs for it is named ``emulated:``. The group has the
flat collectives under their torch 2.11 names and under their 2.13 names.
"""
# mypy: disable-error-code="override, assignment"
# The stubs give most of these methods several signatures; torch.distributed and C++ call the one that is here.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from refshard.costs import CollectiveCost, collective_cost, group_shape
from refshard.emulate import traffic
from refshard.emulate.delay import Call, Delay, recorded
from refshard.emulate.world import EmulatedWorld
from refshard.specs.cluster import CollectiveOp

BACKEND = "emulated"
"""The name of the backend."""
Tensors = Sequence[torch.Tensor]
_CPU = torch.device("cpu")
_BARRIER_BYTES = 4
"""A barrier is an all-reduce of one number."""


@contextmanager
def emulated_world(world: EmulatedWorld) -> Iterator[dist.ProcessGroup]:
    """The default process group of ``world``, as ``init_process_group`` makes it; destroyed at the end."""
    # A store of this process alone: there is nobody to meet.
    dist.init_process_group(BACKEND, store=HashStore(), rank=world.rank, world_size=world.world_size, pg_options=world)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()
        world.close()  # also where torch does not shut down a group that is written in Python


class EmulatedGroup(dist.ProcessGroup):
    """Some ranks of an :class:`EmulatedWorld`, including this process.

    Its name is the emulated library's, because some code chooses collectives by library.
    """

    def __init__(self, world: EmulatedWorld, ranks: Sequence[int], group_name: str) -> None:
        self._rank, self._size = list(ranks).index(world.rank), len(ranks)
        super().__init__(self._rank, self._size)  # type: ignore[call-arg]
        self.world, self._ranks, self._group_name = world, tuple(ranks), group_name
        self._delays: dict[torch.device, Delay] = {}
        self._cost = lru_cache(maxsize=4096)(self._cost_among)
        self._piece: dist.Work | None = None
        self._exchanged = 0

    def name(self) -> str:
        """The library that this group emulates."""
        return self.world.library

    def getBackendName(self) -> str:  # noqa: N802  C++ asks for it by this name
        """What torch's own code takes it for."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override, unused-ignore]
        """The name under which torch knows it."""
        return self._group_name

    def getGroupName(self) -> str:  # noqa: N802
        """As :attr:`group_name`, for C++."""
        return self.group_name

    def shutdown(self) -> None:
        """End the threads that run collectives."""
        for delay in self._delays.values():
            delay.close()

    def abort(self) -> None:
        """As :meth:`shutdown`."""
        self.shutdown()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over the ranks."""
        return self._all_reduce("allreduce_", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor over the ranks, in one message."""
        return self._all_reduce("allreduce_coalesced_", tensors, opts)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> dist.Work:
        by = _reduction(opts)

        def move() -> None:
            for tensor in tensors:
                traffic.multiply(tensor, by, self._size)

        cost = self._cost("all_reduce", _bytes(tensors))
        return self._issue(name, "all_reduce", cost, move, list(tensors), shown=[list(tensors)], opts=opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Send the root's tensors; what another rank holds is what the root is taken to send."""
        move = partial(_each, traffic.touch, tensors)
        cost = self._cost("broadcast", _bytes(tensors))
        return self._issue("broadcast_", "broadcast", cost, move, list(tensors), shown=[list(tensors)], opts=opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce each tensor to the root; nobody else's changes."""
        by, changed = _reduction(opts), tensors if opts.rootRank == self._rank else ()

        def move() -> None:
            for tensor in changed:
                traffic.multiply(tensor, by, self._size)

        cost = self._cost("broadcast", _bytes(tensors))
        return self._issue("reduce_", "reduce", cost, move, list(tensors), shown=[list(tensors)], opts=opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's ``given`` in ``output``."""
        move = partial(traffic.spread, output, given, self._rank)
        cost = self._cost("all_gather", output.nbytes)
        shown = [output, given]
        return self._issue(
            "_allgather_base_", "all_gather", cost, move, shown, results=[output], shown=shown, opts=opts
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, given: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors, in one message."""

        def move() -> None:
            for output, own in zip(outputs, given):
                traffic.spread(output, own, self._rank)

        return self._gather_lists("allgather_into_tensor_coalesced_", outputs, given, move, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor in a list."""

        def move() -> None:
            for parts, own in zip(outputs, given):
                traffic.spread_list(parts, own)

        return self._gather_lists("allgather_", list(chain.from_iterable(outputs)), given, move, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> dist.Work:
        """Gather every rank's tensors in lists, one for each rank."""

        def move() -> None:
            for received in outputs:
                for output, own in zip(received, given):
                    traffic.spread_list([output], own)

        return self._gather_lists("allgather_coalesced_", list(chain.from_iterable(outputs)), given, move, opts)

    def _gather_lists(
        self, name: str, outputs: Tensors, given: Tensors, move: Callable[[], None], opts: Any
    ) -> dist.Work:
        cost, shown = self._cost("all_gather", _bytes(outputs)), [list(outputs), list(given)]
        tensors = [*outputs, *given]
        return self._issue(name, "all_gather", cost, move, tensors, results=list(outputs), shown=shown, opts=opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce this rank's part of every rank's ``given`` to ``output``."""
        move = partial(traffic.combine, output, given, _reduction(opts))
        cost = self._cost("reduce_scatter", given.nbytes)
        return self._issue(
            "_reduce_scatter_base_", "reduce_scatter", cost, move, [given, output],
            results=[output], shown=[output, given], opts=opts,
        )  # fmt: skip

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, given: Tensors, opts: Any = None) -> dist.Work:
        """Reduce and scatter several tensors, in one message."""
        return self._scatter_lists("reduce_scatter_tensor_coalesced_", outputs, given, given, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Tensors, given: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Reduce this rank's tensor of every rank's list."""
        return self._scatter_lists("reduce_scatter_", outputs, given, list(chain.from_iterable(given)), opts)

    def _scatter_lists(
        self, name: str, outputs: Tensors, given: Sequence[torch.Tensor | Tensors], flat: Tensors, opts: Any
    ) -> dist.Work:
        by = _reduction(opts)

        def move() -> None:
            for output, parts in zip(outputs, given):
                traffic.combine(output, parts, by)

        return self._issue(
            name, "reduce_scatter", self._cost("reduce_scatter", _bytes(flat)), move, [*flat, *outputs],
            results=list(outputs), shown=[list(outputs), list(flat)], opts=opts,
        )  # fmt: skip

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        given_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank its part of ``given``; parts are of as many rows as the splits say, or equal."""
        sent, received = (
            _leaving(*pair, self._rank, self._size) for pair in ((given, given_splits), (output, output_splits))
        )
        unsharded = self._unsharded(max(sent, received))
        is_piece = self.world.library == "gloo" and sum(map(bool, given_splits)) == 1
        cost = self._piece_cost(unsharded) if is_piece else self._cost("all_to_all", unsharded)
        move = partial(traffic.exchange, output, given)
        work = self._issue(
            "alltoall_base_", "all_to_all", cost, move, [given, output],
            results=[output], shown=[output, given], opts=opts,
        )  # fmt: skip
        if is_piece:
            self._piece = work
        return work

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, given: Tensors, opts: Any = None) -> dist.Work:
        """Send each rank its tensor of ``given``."""

        def move() -> None:
            for output, sent in zip(outputs, given):
                traffic.exchange(output, sent)

        leaving = max(_bytes(tensors) - tensors[self._rank].nbytes for tensors in (given, outputs))
        return self._issue(
            "alltoall_", "all_to_all", self._cost("all_to_all", self._unsharded(leaving)), move, [*given, *outputs],
            results=list(outputs), shown=[list(outputs), list(given)], opts=opts,
        )  # fmt: skip

    def gather(self, outputs: Sequence[Tensors], given: Tensors, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor in the root's list."""
        flat = list(chain.from_iterable(outputs))
        move = partial(traffic.spread_list, flat, given[0])
        cost = self._cost("all_gather", given[0].nbytes * self._size)
        tensors, shown = [*flat, *given], [flat, list(given)]
        return self._issue("gather_", "gather", cost, move, tensors, results=flat, shown=shown, opts=opts)

    def scatter(self, outputs: Tensors, given: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Receive this rank's tensor of the root's list; what another root would send is invented."""
        flat = list(chain.from_iterable(given))
        move = (
            partial(traffic.spread_list, outputs, flat[self._rank])
            if opts.rootRank == self._rank
            else partial(_each, traffic.invent, outputs)
        )
        cost = self._cost("all_gather", outputs[0].nbytes * self._size)
        tensors, shown = [*flat, *outputs], [list(outputs), flat]
        return self._issue("scatter_", "scatter", cost, move, tensors, results=list(outputs), shown=shown, opts=opts)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Send to a rank of the group."""
        cost = self._pair_cost(peer, _bytes(tensors))
        return self._issue("send", "send", cost, _nothing, list(tensors), shown=[list(tensors)])

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Receive from a rank of the group what is invented here."""
        move, cost = partial(_each, traffic.invent, tensors), self._pair_cost(peer, _bytes(tensors))
        return self._issue("recv_", "recv", cost, move, list(tensors), shown=[list(tensors)])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait as long as a barrier takes, and for the other ranks that are processes, if the world knows how."""
        meet = self.world.meet if self._size == self.world.world_size else None
        cost = self._cost("all_reduce", _BARRIER_BYTES)
        return self._issue("barrier", "barrier", cost, meet or _nothing, [], shown=[])

    def _issue(
        self,
        name: str,
        op: str,
        cost: CollectiveCost,
        move: Callable[[], None],
        tensors: list[torch.Tensor],
        *,
        shown: Sequence[torch.Tensor | list[torch.Tensor]],
        results: list[torch.Tensor] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Announce a collective as c10d's operator ``name`` and start it; ``results`` are ``tensors`` if not given."""
        device = tensors[0].device if tensors else _CPU
        if device not in self._delays:
            self._delays[device] = self.world.delay(device)
        call = Call(
            op=op,
            cost=cost,
            move=move,
            tensors=tensors,
            results=tensors if results is None else results,
            asynchronous=opts is None or opts.asyncOp,
        )
        with recorded(f"c10d::{name}", *shown):
            return self._delays[device].run(call)

    def _cost_among(self, op: CollectiveOp, nbytes: int) -> CollectiveCost:
        return collective_cost(self.world.cluster, op, nbytes, group_shape(self.world.cluster, self._ranks))

    def _unsharded(self, leaving: int) -> int:
        """A tensor's bytes; ``leaving`` of them go from this rank to others, no matter to which."""
        return round(leaving * self._size / max(self._size - 1, 1))

    def _piece_cost(self, nbytes: int) -> CollectiveCost:
        """What a piece of the engine's exchange over gloo takes: what the exchange does, less what it did without it.

        An exchange lasts for as long as a piece is issued before the last one has ended.
        """
        before = 0 if self._piece is None or self._piece.is_completed() else self._exchanged
        self._exchanged = before + nbytes
        whole, part = self._cost("exchange", self._exchanged), self._cost("exchange", before)
        return CollectiveCost(
            whole.link, max(whole.transfer_s - part.transfer_s, 0.0), whole.latency_s, whole.algorithm
        )

    def _pair_cost(self, peer: int, nbytes: int) -> CollectiveCost:
        cluster = self.world.cluster
        return collective_cost(cluster, "broadcast", nbytes, group_shape(cluster, (self.world.rank, self._ranks[peer])))


def _nothing() -> None:
    """What does nothing to this rank's memory."""


def _each(do: Callable[[torch.Tensor], None], tensors: Tensors) -> None:
    for tensor in tensors:
        do(tensor)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _leaving(tensor: torch.Tensor, splits: Sequence[int], rank: int, size: int) -> int:
    """Bytes of the parts that are not this rank's own."""
    if not splits:
        return tensor.nbytes - tensor.nbytes // size
    rows = sum(splits)
    return tensor.nbytes * (rows - splits[rank]) // rows if rows else 0


def _reduction(opts: Any) -> traffic.Reduction:
    if opts is None:
        return traffic.Reduction(dist.ReduceOp.SUM)
    kind = opts.reduceOp.op
    if kind == dist.ReduceOp.PREMUL_SUM:
        return traffic.Reduction(dist.ReduceOp.SUM, opts.reduceOp.factor)
    return traffic.Reduction(kind)


def _create(options: Any, world: EmulatedWorld | None) -> EmulatedGroup:
    """A group as c10d asks for one: the first brings its world, the others are of the same."""
    if world is None:
        default = dist.group.WORLD
        if not isinstance(default, EmulatedGroup):
            raise ValueError(f"backend '{BACKEND}' needs an EmulatedWorld as pg_options, got none; see emulated_world")
        world = default.world
    return EmulatedGroup(world, options.global_ranks_in_group or range(world.world_size), options.group_id)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
