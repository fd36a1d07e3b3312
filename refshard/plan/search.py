"""The fastest configurations that fit, in closed form, with as few layers checkpointed as fit."""

from dataclasses import dataclass

import numpy as np

from refshard.plan.estimate import Estimates, estimate, memory
from refshard.plan.memory import FRAGMENTATION, usable_bytes
from refshard.plan.space import Candidates, Floats, Integers, Mask
from refshard.specs.cluster import ClusterSpec
from refshard.specs.counted import AnyModel

AUTO = "auto"
"""A policy of checkpointing: as few layers as fit."""
MODEL_PARALLEL_PART = 0.97
"""The part of the usable memory that configurations with tensor, context or pipeline parallelism may fill: their closed
form is up to 1.6 % below SimuMax's published runs and up to 2.8 % below dry runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """Estimates of all configurations, ``fits`` those that leave :data:`FRAGMENTATION` of ``usable_bytes`` free, which
    are each row's; ``order`` has the rows that fit, those with most tokens a second and GPU first.
    """

    estimates: Estimates
    usable_bytes: Floats
    fits: Mask
    tokens_per_s_gpu: Floats
    order: Integers


def search(
    model: AnyModel, cluster: ClusterSpec, seq_len: int, candidates: Candidates, usable: Floats | float | None = None
) -> Found:
    """Estimate and rank all. Where checkpointing is :data:`AUTO` it is replaced by the fewest layers that fit.

    ``usable`` is by default what the cluster's GPUs have; ``--offload`` must also fit into its nodes' memory.
    """
    given = usable_bytes(cluster.accelerator, candidates) if usable is None else usable
    usable = np.broadcast_to(np.asarray(given, np.float64), len(candidates))
    divided = candidates["tp"] * candidates["cp"] * candidates["pp"] > 1
    limits = np.where(divided, MODEL_PARALLEL_PART, 1.0) * (1 - FRAGMENTATION) * usable
    resolved = _fewest(model, cluster, seq_len, candidates, limits)
    found = estimate(model, cluster, seq_len, resolved)
    fits = (found.memory.peak <= limits) & (found.host_bytes <= cluster.host_memory_bytes)
    speed = resolved["global_batch"] * seq_len / found.step_s / resolved["gpus"]
    rows = np.flatnonzero(fits)
    # The order of enumeration decides between equals: less splitting comes first.
    order = rows[np.argsort(-speed[rows], kind="stable")]
    return Found(estimates=found, usable_bytes=usable, fits=fits, tokens_per_s_gpu=speed, order=order)


def _fewest(model: AnyModel, cluster: ClusterSpec, seq_len: int, rows: Candidates, limits: Floats) -> Candidates:
    """As few checkpointed layers as fit, else all.

    A step's peak is the highest of several moments, and each layer more lowers each of them by a constant. So the slope
    of the peak at some number of layers tells how many more it takes at least, and no solution is skipped.
    """
    automatic = rows.where("checkpointing", AUTO)
    if not automatic.any():
        return rows
    old = rows.labels["checkpointing"]
    labels = tuple(dict.fromkeys(("none", *(f"first-{count}" for count in range(1, model.n_layers + 2)), *old)))
    codes = np.array([labels.index(label) for label in old], np.int64)[rows["checkpointing"]]
    chosen, limit = rows.take(automatic), limits[automatic]
    most = -(-model.n_layers // chosen["pp"])

    def peak(some: Integers, count: Integers) -> Floats:
        of = chosen.take(some)
        fixed = Candidates({**of.columns, "checkpointing": count}, {**of.labels, "checkpointing": labels})
        return memory(model, cluster, seq_len, fixed).peak

    fewest, some = np.zeros(len(chosen), np.int64), np.arange(len(chosen))
    while len(some):
        here = peak(some, fewest[some])
        over = (here > limit[some]) & (fewest[some] < most[some])
        some, here = some[over], here[over]
        if not len(some):
            break
        each = np.maximum(here - peak(some, fewest[some] + 1), 1.0)
        # The first checkpointed layer makes room for what it recomputes, so it says nothing about the others.
        more = np.where(fewest[some] == 0, 1, np.ceil((here - limit[some]) / each))
        fewest[some] = np.minimum(fewest[some] + more, most[some]).astype(np.int64)
    codes[automatic] = fewest
    return Candidates({**rows.columns, "checkpointing": codes}, {**rows.labels, "checkpointing": labels})
