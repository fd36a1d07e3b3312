"""This project's own engine, in any of its modes."""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch import nn

from refshard.engine.api import engine_of, full_parameters, no_sync, shard, whole_tensors
from refshard.engine.collectives import exchange_bytes, library_of
from refshard.engine.local_part import local_of
from refshard.engine.owners import share_out, step_cost
from refshard.engine.placement import find_mode
from refshard.engine.precision import Precision
from refshard.engine.schedule import OpKind, PassKind, assign_rings, build, chain_markers
from refshard.engine.unit import Unit
from refshard.engine.whole_tensors import WholeTensors
from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.specs.job import WHOLE_MATRICES
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import values
from refshard.strategies.loop import PlainLoop
from refshard.strategies.tensor_parallel import announce_split, split
from refshard.strategies.world import World


@final
class Refshard(Strategy):
    """``refshard.shard`` in the mode of the given name, with the case's options."""

    _model: nn.Module

    def __init__(self, mode: str, *, keep_buffers: bool = False) -> None:
        self._mode, self._keep_buffers = find_mode(mode), keep_buffers
        self._whole: WholeTensors | None = None

    def wrap(self, model: nn.Module, world: World) -> Loop:
        """Modes that shard gradients reduce every microbatch all the same."""
        self._model, self._world = model, world
        self._gloo = library_of(world.group, world.device) == "gloo"
        if world.tensor is not None:
            if (name := world.case.job.optimizer) in WHOLE_MATRICES:
                raise UnsupportedError(
                    f"the engine does not support {name.capitalize()} on matrices split by tensor parallelism"
                )
            split(cast(Llama, model), world.tensor)
        precision = Precision(parameters=world.computed) if world.mixed else None
        shard(
            model, world.data, mode=self._mode.name, blocks=world.blocks, precision=precision,
            offload=world.case.job.offload, initialise=values(model, world), comm_memory=world.case.job.comm_memory,
            keep_buffers=self._keep_buffers,
        )  # fmt: skip
        return PlainLoop(model, world, unsynced=partial(no_sync, model), whole=self._make_whole)

    def _make_whole(
        self, kind: type[torch.optim.Optimizer], tensors: list[nn.Parameter], **options: Any
    ) -> WholeTensors:
        self._whole = whole_tensors(kind, self._model, tensors, **options)
        if self._world.case.processes < self._world.case.job.gpus:
            _warn_of_absent_owners(self._whole, engine_of(self._model).units)
        return self._whole

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in engine_of(self._model).units)

    def announced(self) -> tuple[CollectiveCount, ...]:
        """From the op stream of a chain of these units, not from what was executed."""
        units = engine_of(self._model).units
        facts = [unit.facts for unit in units]
        enclosing = _encloses(self._model, units)
        markers = chain_markers(len(units), enclosing=enclosing)
        # Backward does not reach what comes before the first unit that is trained.
        first = next((place for place, fact in enumerate(facts) if fact.trained and place >= enclosing), len(units))
        reached = {*range(first, len(units)), *range(enclosing)}
        markers = tuple(marker for marker in markers if marker.phase == "forward" or marker.unit in reached)
        rings = assign_rings(markers, facts)
        kept, microbatches = self._mode.parameters == "replicate", self._world.case.job.microbatches
        if self._world.case.job.workload == "training":
            reduced_once = self._mode.gradients == "replicate"
            kinds = [PassKind(reduce=not reduced_once or i == microbatches - 1) for i in range(microbatches)]
        else:
            kinds = [PassKind(training=False, reduce=False)] * microbatches
        streams = [build(markers, rings, facts, kind) for kind in kinds]
        training = kinds[0].training
        issued = [
            c
            for i, stream in enumerate(streams)
            for op in stream
            # Parameters that are kept are gathered once after each optimizer step that changes them.
            if op.kind is not OpKind.GATHER or not kept or (i == 0 and training and facts[op.unit].trained)
            for c in self._issued(op.kind, units[op.unit])
        ]
        # At the end of each backward the ranks tell each other which parameters they have used, a byte for each.
        told = sum(len(unit.trained) for unit in units)
        axes = [n for n in (self._world.shards, self._world.case.job.dp_replicate) if n > 1]
        issued += [("all_reduce", told)] * len(axes) * sum(any(f.reduces(kind) for f in facts) for kind in kinds)
        if self._world.tensor is not None:
            issued += announce_split(cast(Llama, self._model), self._world, self._world.computed)
        if self._whole is not None:
            issued += _announce_owners(self._whole, units, self._world.case)
        return count_collectives(issued)

    def _issued(self, kind: OpKind, unit: Unit) -> Iterator[tuple[str, int]]:
        """``(op, bytes)`` of an op's calls: over gloo, an exchange with each other rank, in pieces."""
        shards, replicas = self._world.shards, self._world.case.job.dp_replicate
        if shards * replicas == 1:
            return
        for flat in unit.flats:
            if kind is OpKind.GATHER and not unit.aliased:
                op, itemsize = "all_gather", flat.dtype.itemsize
            elif kind is OpKind.REDUCE and flat.trained:
                op, itemsize = "reduce_scatter", flat.reduce_dtype.itemsize
            else:
                continue
            if self._mode.optimizer == "replicate":
                if kind is OpKind.REDUCE:
                    yield "all_reduce", flat.layout.numel * itemsize
                continue
            if self._gloo:
                calls = exchange_bytes(flat.layout.shard_numel, itemsize, shards)
                yield from (("all_to_all", nbytes) for nbytes in calls)
            else:
                yield op, flat.layout.numel * itemsize
            if kind is OpKind.REDUCE and replicas > 1:
                yield "all_reduce", flat.layout.shard_numel * itemsize

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from full_parameters(self._model)


def _encloses(model: nn.Module, units: Sequence[Unit]) -> bool:
    """Whether the first unit computes around the others: it holds them, or by a tie also modules after them."""
    if len(units) < 2:
        return False
    place, second = {module: i for i, module in enumerate(model.modules())}, units[1].modules[0]
    return any(second in set(one.modules()) or place[one] > place[second] for one in units[0].modules)


def _announce_owners(whole: WholeTensors, units: Sequence[Unit], case: Case) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of a step of whole tensors. First the ranks agree on what is stepped, with two int64. Then, for
    each flat parameter that has such tensors, this rank sends its parts of their gradients and of them to the owners,
    and gets the tensors that it owns; then the other way round. An exchange's bytes are the larger of the two.
    """
    by_flat = _owned_tensors(whole, units)
    if by_flat:
        yield from [("all_reduce", 16)] * (2 if case.job.dp_replicate > 1 else 1)
    for owner_of in by_flat:
        parts = sum(local_of(m).nbytes for m in owner_of)
        owned = sum(m.nbytes for m, owner in owner_of.items() if owner == whole.collectives.rank)
        yield from [("all_to_all", max(parts, owned))] * 3


def _warn_of_absent_owners(whole: WholeTensors, units: Sequence[Unit]) -> None:
    """Warn of the work of ranks that do not run here: a bucket is done when its busiest rank is."""
    rank, ranks = whole.collectives.rank, whole.collectives.world_size
    costs = [[step_cost(tensor.shape) for tensor in owner_of] for owner_of in _owned_tensors(whole, units)]
    own = busiest = 0
    for indices, owners in share_out(costs, ranks):
        loads = [0] * ranks
        for owner, cost in zip(owners, (cost for index in indices for cost in costs[index])):
            loads[owner] += cost
        own, busiest = own + loads[rank], busiest + max(loads)
    if own < busiest:
        warnings.warn(
            f"refshard: {whole.made.__name__}'s work on rank {rank} is {100 * own / busiest:.0f} % of what the ranks "
            "wait for, summed over buckets; the other ranks do not run here, so the step time is too low by the rest",
            stacklevel=1,
        )


def _owned_tensors(whole: WholeTensors, units: Sequence[Unit]) -> list[dict[nn.Parameter, int]]:
    """The tensors to step of each flat parameter that has some, with their owners."""
    owner_of = {member.parameter: member.owner for member in whole.members if member.whole is not None}
    flats = [[p.sharded for p in flat.parameters if p.sharded in owner_of] for unit in units for flat in unit.flats]
    return [{tensor: owner_of[tensor] for tensor in tensors} for tensors in flats if tensors]
