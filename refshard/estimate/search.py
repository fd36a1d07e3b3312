"""Among many configurations, those that fit and are fastest: closed forms, with as few layers checkpointed as fit."""

from dataclasses import dataclass, replace

import numpy as np

from refshard.estimate.candidates import Candidates, Floats, Integers, Mask
from refshard.estimate.estimate import Estimates, estimate
from refshard.specs.cluster import ClusterSpec
from refshard.specs.model import ModelSpec

AUTO = "auto"
"""For checkpointing: as few layers as fit."""
MODEL_PARALLEL_PART = 0.92
"""Of the usable memory, what configurations with tensor, context or pipeline parallelism may fill: their closed form is
up to 7 % low on SimuMax's published runs, and more on the first stage of dry runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """Estimates of all configurations, ``fits`` those within ``usable_bytes``; ``order`` has the rows that fit, those
    with most tokens a second and GPU first.
    """

    estimates: Estimates
    usable_bytes: int
    fits: Mask
    tokens_per_s_gpu: Floats
    order: Integers


def search(model: ModelSpec, cluster: ClusterSpec, seq_len: int, candidates: Candidates, usable_bytes: int) -> Found:
    """Estimate and rank all. Where checkpointing is :data:`AUTO` it is replaced by the fewest layers that fit."""
    limits = _limits(candidates, usable_bytes)
    resolved = _fewest(model, cluster, seq_len, candidates, limits)
    found = estimate(model, cluster, seq_len, resolved)
    fits = found.memory.peak <= limits
    batch = resolved.data_ranks * resolved["microbatch"] * resolved["microbatches"]
    speed = batch * seq_len / found.step_s / resolved.world_size
    rows = np.flatnonzero(fits)
    # The order of enumeration decides between equals: less splitting comes first.
    order = rows[np.argsort(-speed[rows], kind="stable")]
    return Found(estimates=found, usable_bytes=usable_bytes, fits=fits, tokens_per_s_gpu=speed, order=order)


def _limits(rows: Candidates, usable_bytes: int) -> Floats:
    divided = rows["tensor"] * rows["context"] * rows["pipeline"] > 1
    found: Floats = np.where(divided, MODEL_PARALLEL_PART * usable_bytes, float(usable_bytes))
    return found


def _fewest(model: ModelSpec, cluster: ClusterSpec, seq_len: int, rows: Candidates, limits: Floats) -> Candidates:
    """Memory falls by as much for each layer more that is checkpointed, so two points tell how many it takes; once the
    peak is where all gradients are, it falls no more.
    """
    automatic = rows.where("checkpointing", AUTO)
    if not automatic.any():
        return rows
    words = tuple(word for word in rows.words["checkpointing"] if word != AUTO)
    counts = tuple(map(str, range(1, model.n_layers + 1)))
    words = tuple(dict.fromkeys((*words, "none", *counts)))
    place = {word: index for index, word in enumerate(words)}
    old = rows.words["checkpointing"]
    codes = np.array([place.get(word, 0) for word in old], np.int64)[rows["checkpointing"]]
    chosen = rows.take(automatic)

    def peak(word: str) -> Floats:
        fixed = replace(
            chosen,
            columns={**chosen.columns, "checkpointing": np.zeros(len(chosen), np.int64)},
            words={**chosen.words, "checkpointing": (word,)},
        )
        return estimate(model, cluster, seq_len, fixed).memory.peak

    most = -(-model.n_layers // chosen["pipeline"])
    none, one, two = peak("none"), peak("1"), peak("2")
    each = np.maximum(one - two, 1.0)
    limit = limits[automatic]
    needed = np.clip(1 + np.ceil((one - limit) / each), 1, most).astype(np.int64)
    codes[automatic] = np.where(none <= limit, place["none"], place["1"] + needed - 1)
    return Candidates({**rows.columns, "checkpointing": codes}, {**rows.words, "checkpointing": words})
