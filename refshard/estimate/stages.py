"""How layers are dealt to a pipeline's stages, and how long a step takes that passes through them.

With p ranks, each with v stretches of layers, and m microbatches, a step takes m times the slowest rank's time of a
microbatch, and the time for which that rank waits for the first to arrive and the last to leave: what the other ranks
take for one, divided by v (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021).
A zero-bubble schedule fills it with the gradients of weights, which nobody waits for (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023).
"""

from dataclasses import dataclass

import numpy as np

from refshard.estimate.candidates import Candidates, Floats, Integers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Layers of a rank: of one in the middle of the pipeline, of the first, which also embeds, and of the last, which
    also has the head. One entry a row.
    """

    middle: Integers
    first: Integers
    last: Integers


def deal(n_layers: int, candidates: Candidates) -> Stages:
    """Divide the layers evenly. Where the embedding and the head, each counted as a layer, make the division even, they
    count as such (Megatron's and torchtitan's options for this).
    """
    ranks, stretches = candidates["pipeline"], candidates["pipeline"] * candidates["interleave"]
    ends_count = (n_layers % stretches != 0) & ((n_layers + 2) % stretches == 0)
    rounded = -(-n_layers // ranks)
    middle = np.where(ends_count, (n_layers + 2) // ranks, rounded)
    ends = np.where(ends_count, middle - 1, np.where(n_layers % ranks, n_layers // ranks, rounded))
    # One layer fewer on both ends leaves one over where only one rank has fewer; the last has the head besides.
    first = np.where(~ends_count & (n_layers % ranks == ranks - 1), rounded, ends)
    return Stages(middle=middle, first=first, last=ends)


def step_seconds(candidates: Candidates, slowest_s: Floats, all_s: Floats, weight_s: Floats) -> tuple[Floats, Floats]:
    """A step's time, and how much of it the slowest rank waits for the others.

    ``slowest_s`` is its time of a microbatch, ``all_s`` that of all ranks, ``weight_s`` what of the slowest rank's is
    gradients of weights.
    """
    waiting = (all_s - slowest_s) / candidates["interleave"]
    filled = candidates.where("schedule", "zero-bubble")
    # Of three like parts (forward, gradients of inputs and of weights) the last fills the wait of the first two.
    waiting = np.where(filled, waiting * np.maximum(0.0, 1 - 2 * weight_s / slowest_s), waiting)
    return candidates["microbatches"] * slowest_s + waiting, waiting


def in_flight(candidates: Candidates) -> Floats:
    """Microbatches whose activations the first rank holds at once, which holds most; in parts of its layers.

    1F1B: one for each rank of the pipeline. Interleaved: ``p v + p - 1`` stretches of the rank's v (Megatron's warm-up
    of 2 (p - 1) + (v - 1) p and the one that computes).
    """
    ranks, parts = candidates["pipeline"], candidates["interleave"]
    held = np.where(parts > 1, (2 * (ranks - 1) + (parts - 1) * ranks + 1) / parts, ranks)
    return np.minimum(held, candidates["microbatches"])
