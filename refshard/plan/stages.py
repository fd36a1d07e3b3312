"""How layers are dealt to a pipeline's stages, and how long a step takes that passes through them.

With p ranks, each with v stretches of layers, and m microbatches, a step takes m times the slowest rank's time of a
microbatch, and the time for which that rank waits for the first to arrive and the last to leave: what the other ranks
take for one, divided by v (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021).
A zero-bubble schedule fills it with the gradients of weights, which nobody waits for (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023).
"""

from dataclasses import dataclass

import numpy as np

from refshard.plan.space import Candidates, Floats, Integers
from refshard.specs.layers import sizes_of_stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Layers of a rank in the middle of the pipeline, of the first, which also embeds, and of the last, which also has
    the head; and of the first rank's first stage. One entry a row.
    """

    middle: Integers
    first: Integers
    last: Integers
    begin: Integers


def deal(n_layers: int, candidates: Candidates) -> Stages:
    """Divide the layers as a row's ``stages`` say, or evenly. Where the embedding and the head, each counted as a
    layer, make the division even, they count as such (Megatron's and torchtitan's options for this). ``middle`` are the
    most layers of a rank that is neither the first nor the last, 0 without one.

    Raises:
        SpecError: a row's ``stages`` do not fit the model and the pipeline.
    """
    ranks, stretches = candidates["pp"], candidates["pp"] * candidates["interleave"]
    ends_count = (n_layers % stretches != 0) & ((n_layers + 2) % stretches == 0)
    rounded = -(-n_layers // ranks)
    middle = np.where(ends_count, (n_layers + 2) // ranks, rounded)
    ends = np.where(ends_count, middle - 1, np.where(n_layers % ranks, n_layers // ranks, rounded))
    # One layer fewer on both ends leaves one over where only one rank has fewer; the last has the head besides.
    first = np.where(~ends_count & (n_layers % ranks == ranks - 1), rounded, ends)
    begin = np.maximum(1, first // candidates["interleave"])
    found = np.array([np.where(ranks > 2, middle, 0), first, ends, begin])
    for row in np.flatnonzero(~candidates.where("stages", "")):
        count, given = int(ranks[row]), candidates.labels["stages"][candidates["stages"][row]]
        sizes = sizes_of_stages(given, n_layers, int(stretches[row]))
        held = [sum(sizes[rank::count]) for rank in range(count)]
        found[:, row] = max(held[1:-1], default=0), held[0], held[-1], sizes[0]
    return Stages(middle=found[0], first=found[1], last=found[2], begin=found[3])


def step_seconds(candidates: Candidates, slowest_s: Floats, all_s: Floats, weight_s: Floats) -> tuple[Floats, Floats]:
    """A step's time, and how much of it the slowest rank waits for the others.

    ``slowest_s`` is its time of a microbatch, ``weight_s`` the part of it for gradients of weights, ``all_s`` the time
    of all ranks.
    """
    waiting = (all_s - slowest_s) / candidates["interleave"]
    filled = candidates.where("schedule", "zero-bubble")
    # A microbatch has three similar parts: forward, gradients of inputs and of weights. The third fills the wait.
    waiting = np.where(filled, waiting * np.maximum(0.0, 1 - 2 * weight_s / slowest_s), waiting)
    return candidates["microbatches"] * slowest_s + waiting, waiting


def in_flight(candidates: Candidates, rank: Integers | int = 0) -> Floats:
    """Microbatches with activations on the pipeline's ``rank`` at once, in parts of its layers.

    1F1B: one for each rank from this one on. Interleaved: the warm-up's stretches and the one that computes
    (:func:`_warm_up`). With a zero-bubble schedule a rank delays the gradients of weights of as many microbatches as
    ranks come before it, and keeps what those need.
    """
    parts = candidates["interleave"]
    delayed = np.where(candidates.where("schedule", "zero-bubble"), rank, 0)
    held = (_warm_up(candidates, rank) + 1 + delayed) / parts
    return np.minimum(held, candidates["microbatches"])


def held_by_first_backward(candidates: Candidates) -> Floats:
    """Microbatches in flight on the first rank when the model's first layers end their first backward: a round of
    microbatches has left its other stretches.
    """
    parts = candidates["interleave"]
    left = candidates["microbatches"] * parts - (parts - 1) * _round(candidates)
    return (np.minimum(_warm_up(candidates, 0) + 1, left) - 1) / parts


def delayed_weights(candidates: Candidates, rank: Integers | int) -> Floats:
    """Microbatches, in parts of the rank's layers, with delayed gradients of weights, and the one that computes."""
    waiting = candidates.where("schedule", "zero-bubble") & (candidates["pp"] > 1)
    return np.where(waiting, (rank + 1) / candidates["interleave"], 0.0)


def _warm_up(candidates: Candidates, rank: Integers | int) -> Integers:
    """Forwards of stretches before the first backward: a round of microbatches for each stretch but one, and two for
    each rank that follows, so that messages have time (Megatron's and torch's); one for 1F1B and zero bubble.
    """
    parts = candidates["interleave"]
    times = np.where((parts > 1) & ~candidates.where("schedule", "zero-bubble"), 2, 1)
    found: Integers = times * (candidates["pp"] - 1 - rank) + (parts - 1) * _round(candidates)
    return found


def _round(candidates: Candidates) -> Integers:
    """Microbatches that pass through one stretch before the first of them enters the next: as many as there are ranks,
    or a few more if that does not divide them.
    """
    microbatches = candidates["microbatches"]
    found: Integers = microbatches // np.maximum(1, microbatches // candidates["pp"])
    return found
