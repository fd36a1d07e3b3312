"""Memory of one rank in closed form: what torch's allocator hands out at a step's peak, in bytes, one entry a row."""

from dataclasses import dataclass

import numpy as np

from refshard.estimate.candidates import Candidates, Floats, by_distinct
from refshard.estimate.stages import Stages, in_flight
from refshard.estimate.ways import ADAM_BYTES, MASTER_BYTES, find_way

PARTS = ("masters", "optimizer", "gradients", "unsharded", "activations", "workspace")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Bytes by category; ``peak`` is their sum."""

    masters: Floats
    optimizer: Floats
    gradients: Floats
    unsharded: Floats
    activations: Floats
    workspace: Floats

    @property
    def peak(self) -> Floats:
        """What is allocated at the peak."""
        total: Floats = sum((getattr(self, part) for part in PARTS), start=np.zeros_like(self.masters))
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """Elements and bytes of the parts of a rank, one entry a row: its parameters, its largest unit's, and one of the
    ends; what a layer keeps by its checkpointing, and what the loss needs.
    """

    parameters: Floats
    unit: Floats
    end: Floats
    kept: Floats
    recomputed: Floats
    workspace: Floats
    loss: Floats
    layers: Floats


def memory_of(candidates: Candidates, held: Held, element: Floats, reduction: Floats) -> Memory:
    """Each category at the peak. ``element`` and ``reduction`` are bytes of a parameter in compute and of a gradient as
    it is reduced.
    """
    way = {name: candidates.mapped("strategy", lambda word, name=name: float(getattr(find_way(word), name)))
           for name in ("shards_parameters", "shards_gradients", "shards_optimizer", "kept_bytes", "summed_bytes",
                        "parameter_slots", "copies_out", "casts")}  # fmt: skip
    shards = np.where(way["shards_optimizer"] > 0, candidates.shards, 1)
    own = held.parameters / shards
    by_unit = way["shards_parameters"] > 0
    stays = by_unit & ((candidates["pipeline"] > 1) | ~candidates.flag("reshard"))
    adds_up = by_unit & (candidates["microbatches"] > 1) & ((candidates["pipeline"] > 1) | ~candidates.flag("reduce_each"))
    offloaded = candidates.flag("offload")
    kept = way["kept_bytes"] * held.parameters + way["casts"] * np.where(element < MASTER_BYTES, element, 0) * held.parameters
    units = (way["parameter_slots"] + way["copies_out"]) * element * held.unit
    unsharded = np.where(by_unit, np.where(stays, element * held.parameters, units), kept)
    gradients = np.where(by_unit, MASTER_BYTES * own, way["summed_bytes"] * held.parameters)
    gradients = gradients + np.where(adds_up, MASTER_BYTES * held.parameters, 0)
    in_reduction = np.where(by_unit, (element + reduction) * held.unit, element * held.unit * (way["casts"] > 0))
    activations = held.layers * held.kept * in_flight(candidates)
    of_layer = held.recomputed + held.workspace + in_reduction
    of_loss = held.loss + np.where(by_unit, element * held.end, 0)
    return Memory(
        masters=np.where(offloaded, 0, MASTER_BYTES * own),
        optimizer=np.where(offloaded, 0, ADAM_BYTES * own),
        gradients=np.where(offloaded & by_unit, 0, gradients),
        unsharded=unsharded,
        activations=activations,
        workspace=np.maximum(of_layer, of_loss),
    )
