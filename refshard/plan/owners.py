"""Which rank steps which tensor, where an optimizer needs whole ones. Pure arithmetic on shapes.

A tensor is brought to one rank, its owner, which steps it and sends the parts back. Tensors take turns in *buckets*,
so that few whole ones exist at a time; a bucket takes as long as its busiest rank.
"""

import math
from collections.abc import Iterator, Sequence

IMBALANCE = 1.25
"""How much more than the mean the busiest rank of a bucket may have to do: a lower limit needs larger buckets."""


def step_cost(shape: Sequence[int]) -> int:
    """What a step of one tensor costs, in multiply-adds up to a factor: m * n * min(m, n) of a matrix.

    That is the cost of the matrix products in Newton-Schulz (Muon) and in factored preconditioners (Shampoo). A tensor
    of more dimensions counts as the matrix of its first dimension times all others, one of fewer as its elements.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * (min(rows, columns) if len(shape) > 1 else 1)


def share_out(costs: Sequence[Sequence[int]], ranks: int) -> Iterator[tuple[range, list[int]]]:
    """Buckets, each a range of flat parameters and the owners of all their tensors; ``costs`` are those of the tensors
    of each flat parameter.

    A bucket is the fewest flat parameters in a row that the ranks can share within :data:`IMBALANCE`; the last one may
    have to be shared worse.
    """
    loads = [0] * ranks
    first = 0
    for index in range(len(costs)):
        bucket = [cost for of_flat in costs[first : index + 1] for cost in of_flat]
        owners = choose_owners(bucket, loads)
        shares = [sum(cost for cost, owner in zip(bucket, owners) if owner == rank) for rank in range(ranks)]
        if max(shares) * ranks <= IMBALANCE * sum(bucket) or index == len(costs) - 1:
            yield range(first, index + 1), owners
            loads = [load + share for load, share in zip(loads, shares)]
            first = index + 1


def choose_owners(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The owner of each tensor of a bucket; largest first, each goes to the rank that has the least of the bucket.

    Among equals it goes to the rank that has the least so far, by ``loads``.
    """
    owners, shares = [0] * len(costs), [0] * len(loads)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(len(loads)), key=lambda rank: (shares[rank], loads[rank], rank))
        owners[index] = owner
        shares[owner] += costs[index]
    return owners
