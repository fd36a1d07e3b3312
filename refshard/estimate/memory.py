"""Memory of one rank in closed form: what torch's allocator hands out at a step's peak, in bytes, one entry a row."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from refshard.estimate.candidates import Candidates, Floats
from refshard.estimate.stages import in_flight
from refshard.estimate.ways import ADAM_BYTES, fact
from refshard.plan.recipe import MASTER_BYTES

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
    """Elements of the parts of a rank, one entry a row: all parameters, its largest unit's, the larger end's and both
    ends'; and bytes: what a layer ``kept`` on average, what the ``first`` one keeps, which is checkpointed if any is,
    what is ``recomputed``, a layer's ``workspace``, what the ``loss`` needs and the ``logits`` alone.
    """

    parameters: Floats
    unit: Floats
    end: Floats
    ends: Floats
    kept: Floats
    first: Floats
    recomputed: Floats
    workspace: Floats
    loss: Floats
    logits: Floats
    layers: Floats


def memory_of(candidates: Candidates, held: Held, element: Floats, reduction: Floats) -> Memory:
    """Each category at the peak, the highest of three: the loss, the backward of the last layer, when all activations
    are there, and that of the first one, when all gradients are. ``element`` and ``reduction`` are bytes of a parameter
    in compute and of a gradient as it is reduced.
    """
    way = _Facts(candidates)
    own = held.parameters / np.where(way["shards_optimizer"] > 0, candidates.shards, 1)
    by_unit, ring, around = way["shards_parameters"] > 0, way["ring"] > 0, way["around"] > 0
    pipelined = candidates["pipeline"] > 1
    stays = by_unit & (pipelined | ~candidates.flag("reshard") | (way["keeps"] > 0))
    adds_up = by_unit & (candidates["microbatches"] > 1) & (pipelined | ~candidates.flag("reduce_each"))
    offloaded = candidates.flag("offload")
    autocast = np.where((way["casts"] > 0) & (element < MASTER_BYTES), element, 0) * held.parameters
    ends = np.where(around & ~stays, element * held.ends, 0)
    slots = way["parameter_slots"] * (element + np.where(ring, reduction, 0)) + np.where(
        ring, 0, way["copies_out"] * element
    )
    whole = np.where(stays, element * held.parameters, way["kept_bytes"] * held.parameters + autocast) + ends
    gradients = np.where(by_unit, MASTER_BYTES * own, way["summed_bytes"] * held.parameters)
    gradients = gradients + np.where(adds_up, MASTER_BYTES * held.parameters, 0)
    activations = held.layers * held.kept * in_flight(candidates)
    # While the layer computes, its activations are there, and parameters of the next; at its end, its gradients as they
    # came and as they are reduced.
    slotted = way["gradient_slots"] > 0
    added = np.where(ring, element, np.where(slotted, way["gradient_slots"] * reduction, element + reduction))
    reduced = np.where(by_unit, added, element * (way["casts"] > 0)) * held.unit
    gathered = np.where(by_unit & (~stays | ring), slots, 0) * held.unit
    computing = held.recomputed + held.workspace + gathered + np.where(ring, 0, element * held.unit)
    ending = reduced + np.where(ring, gathered, np.where(stays, 0, 2 * element * held.unit)) + held.workspace / 3
    # A pipeline's stage is reduced after its last backward, whose activations are gone: one unit after the other, the
    # next beside the last.
    at_end = 2 * reduction * held.unit + element * held.end - activations
    ending = np.where(by_unit & pipelined, at_end, ending)
    of_layer = np.maximum(computing, ending)
    end = np.where(by_unit & ~stays & ~around, element * held.end, 0) + np.where(ring, slots * held.unit, 0)
    end = end + np.where(slotted, element * held.unit, 0)
    of_head = held.logits + element * held.end + np.where(by_unit, reduction * held.end, 0)
    of_loss = end + np.maximum(held.loss, np.where(held.loss > 0, of_head, 0))
    # Those that a step begins without come as its only microbatch's activations go, and the weights that autocast cast;
    # later ones find them there.
    comes = np.where(by_unit, ~offloaded, way["casts"] > 0) & (candidates["microbatches"] == 1)
    coming = np.where(comes, MASTER_BYTES * own, 0)
    going = activations - held.first + autocast + np.maximum(of_loss - of_layer, 0)
    late = coming > going
    gradients = np.where(late, gradients, gradients - coming)
    return Memory(
        masters=np.where(offloaded, 0, MASTER_BYTES * own),
        optimizer=np.where(offloaded, 0, ADAM_BYTES * own),
        gradients=np.where(offloaded & by_unit, 0, gradients),
        unsharded=np.where(late, whole - autocast, whole),
        activations=np.where(late, held.first, activations),
        workspace=np.where(late, of_layer, np.maximum(of_layer, of_loss)),
    )


class _Facts:
    """A strategy's numbers, one a row."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates

    def __getitem__(self, name: str) -> Floats:
        return self._candidates.mapped("strategy", partial(fact, name=name))
