"""Muon over the engine's shards: what the owners of matrices exchange, and how much of their work one rank tells of."""

import warnings
from collections.abc import Iterator, Sequence

from torch import nn

from refshard.engine.local_part import local_of
from refshard.engine.owners import share_out, step_cost
from refshard.engine.unit import Unit
from refshard.engine.whole_tensors import WholeTensors
from refshard.specs.case import CaseSpec

_AGREEMENT_BYTES = 16
"""What a rank sends so that all agree on what is stepped: two int64."""


def announce_owners(muon: WholeTensors, units: Sequence[Unit], case: CaseSpec) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of what a step exchanges. First the ranks agree on what is stepped. Then, of each flat parameter
    that has matrices, this rank sends its parts of their gradients and of the matrices to the owners, and the matrices
    that it owns to all.
    """
    owner_of = _owners(muon)
    if owner_of:
        yield from [("all_reduce", _AGREEMENT_BYTES)] * (2 if case.replicas > 1 else 1)
    for matrices in _by_flat(owner_of, units):
        yield from [("all_to_all", sum(local_of(m).nbytes for m in matrices))] * 2
        yield "all_to_all", sum(m.nbytes for m in matrices if owner_of[m] == muon.collectives.rank)


def warn_of_absent_owners(muon: WholeTensors, units: Sequence[Unit], case: CaseSpec) -> None:
    """Where other ranks do not run, say what is missing: a bucket is done when its busiest rank is."""
    if case.processes == case.world_size:
        return
    rank, ranks = muon.collectives.rank, muon.collectives.world_size
    costs = [[step_cost(matrix.shape) for matrix in matrices] for matrices in _by_flat(_owners(muon), units)]
    own = busiest = 0
    for indices, owners in share_out(costs, ranks):
        loads = [0] * ranks
        for owner, cost in zip(owners, (cost for index in indices for cost in costs[index])):
            loads[owner] += cost
        own, busiest = own + loads[rank], busiest + max(loads)
    if own < busiest:
        warnings.warn(
            f"refshard: Muon's work on rank {rank} is {100 * own / busiest:.0f} % of what the ranks wait for, summed "
            "over buckets; the other ranks do not run here, so the step time is too low by the rest",
            stacklevel=1,
        )


def _owners(muon: WholeTensors) -> dict[nn.Parameter, int]:
    """The owner of each matrix that ranks hold parts of."""
    return {member.parameter: member.owner for member in muon.members if member.whole is not None}


def _by_flat(owner_of: dict[nn.Parameter, int], units: Sequence[Unit]) -> Iterator[list[nn.Parameter]]:
    """The matrices of each flat parameter that has some."""
    for flat in (flat for unit in units for flat in unit.flats):
        if matrices := [p.sharded for p in flat.parameters if p.sharded in owner_of]:
            yield matrices
