"""Which rank steps which tensor, where an optimizer needs whole ones. Pure arithmetic on shapes.

A tensor is brought to one rank, its owner, which steps it and sends the parts back. Tensors take turns in *buckets*,
so that few whole ones exist at a time; what a bucket takes is what its busiest rank takes.
"""

import math
from collections.abc import Sequence


def step_cost(shape: Sequence[int]) -> int:
    """What a step of one tensor costs, in multiply-adds up to a factor: m * n * min(m, n) of a matrix.

    That is the cost of the matrix products in Newton-Schulz (Muon) and in factored preconditioners (Shampoo). A tensor
    of more dimensions counts as the matrix of its first dimension times all others, one of fewer as its elements.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * (min(rows, columns) if len(shape) > 1 else 1)


def fill_buckets(costs: Sequence[Sequence[int]], ranks: int) -> tuple[range, ...]:
    """Ranges of flat parameters that form a bucket; ``costs`` are those of the tensors in each flat parameter.

    A bucket is as small as it can be with as much work for each of the ``ranks`` as its largest tensor is: then that
    tensor's owner keeps no other rank waiting. The last bucket may have less.
    """
    buckets, first, total, largest = [], 0, 0, 0
    for index, of_flat in enumerate(costs):
        total += sum(of_flat)
        largest = max(largest, *of_flat)
        if total >= ranks * largest:
            buckets.append(range(first, index + 1))
            first, total, largest = index + 1, 0, 0
    if first < len(costs):
        buckets.append(range(first, len(costs)))
    return tuple(buckets)


def choose_owners(costs: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each tensor of a bucket; largest first, each goes to the rank that has the least of the bucket.

    Among equals it goes to the one that owns the least so far, by ``loads``, to which this bucket's costs are added.
    """
    owners, bucket = [0] * len(costs), [0] * len(loads)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(len(loads)), key=lambda rank: (bucket[rank], loads[rank], rank))
        owners[index] = owner
        bucket[owner] += costs[index]
        loads[owner] += costs[index]
    return owners
