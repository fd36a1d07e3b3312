"""Memory of one rank in closed form: what torch's allocator hands out at a step's peak, in bytes, one entry a row.

A rank's peak is the highest of a few moments of a step, each counted in full; a configuration's is the highest over its
ranks.

Activations are the tensors that autograd saves of a decoder block: the inputs of its norms and products, queries, keys
and values, the output of attention with its sums (or, without a fused kernel, its scores), and what the feed-forward
multiplies. Under tensor parallelism the residual stream is divided by sequence; torch keeps the gathered input of a
product, Megatron its part, and gathers again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refshard.outside_memory import outside_bytes
from refshard.plan.cost_models import MASTER_BYTES
from refshard.plan.kernels import (
    Share,
    attention_width,
    expert_rows,
    hidden_bytes,
    inner_tokens_width,
    projected_width,
)
from refshard.plan.space import Candidates, Floats, Mask
from refshard.specs.counted import AnyModel
from refshard.specs.hardware import HardwareSpec
from refshard.specs.job import Job
from refshard.specs.model import ModelSpec

FRAGMENTATION = 0.02
"""The part of the usable memory that a plan leaves free, for what the allocator cannot use and closed forms leave out.
With expandable segments, which a plan assumes, dry runs at full depth need up to 1.9 % more than their closed forms
(validation/fragmentation.json).
"""
_FIXED_SEGMENTS = {"data parallel": 0.21, "model parallel": 0.19, "adapters": 0.06, "experts": 0.20}


def fixed_segments(job: Job, model: AnyModel) -> float:
    """How much more than in closed form dry runs of the job's kind need at most without expandable segments, as a
    fraction (validation/fragmentation.json).
    """
    if job.lora is not None:
        return _FIXED_SEGMENTS["adapters"]
    if model.experts is not None:
        return _FIXED_SEGMENTS["experts"]
    return _FIXED_SEGMENTS["model parallel" if job.tp * job.cp * job.pp > 1 else "data parallel"]


def usable_bytes(hardware: HardwareSpec, candidates: Candidates) -> Floats:
    """Bytes that torch's allocator can reserve on each row's ranks: all but a GPU's CUDA context, and a communicator
    for each axis of the mesh. On a CPU, nothing lies outside of it.
    """
    if not hardware.asynchronous:
        return np.full(len(candidates), float(hardware.memory_bytes))
    axes = [candidates["tp"], candidates["cp"], candidates["pp"], candidates["ep"]]
    axes += [candidates.data_ranks * candidates["cp"] // candidates["dp_replicate"], candidates["dp_replicate"]]
    groups = sum((size > 1).astype(np.int64) for size in axes)
    outside = np.array([float(outside_bytes(hardware, count)) for count in range(len(axes) + 1)])
    return hardware.memory_bytes - outside[groups]


SCORE_BYTES = 4
"""One of attention's scores, in fp32; a fused kernel in bf16 stores none."""
SUMS_BYTES = 4
"""Attention's logarithm of the sum of a query's scores, in fp32, by head and token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes that one layer keeps from forward to backward, and needs in backward.

    - ``none``, ``selective``, ``full``: kept with each policy of checkpointing; ``full`` is the layer's input.
    - ``workspace``: also needed while its backward runs.
    - ``after_product``, ``after_feed_forward``, ``after_layer``: bytes in addition to ``none`` (negative if fewer) when
      backward has passed the layer's last product, the rest of the feed-forward (with what attention's scores need),
      and the whole layer.
    - ``delayed``: output gradients that a zero-bubble schedule keeps, to compute weight gradients later.
    """

    none: float
    selective: float
    full: float
    workspace: float
    after_product: float
    after_feed_forward: float
    after_layer: float
    delayed: float


def layer_memory(
    model: ModelSpec, share: Share, *, dense: bool, gathers_again: bool, casts: bool = False
) -> LayerMemory:
    """The memory of one layer and microbatch. ``gathers_again``: products keep their part of an input and gather it
    again, as in Megatron. If autocast ``casts``, the residual stream is fp32, and each product has its own copy of its
    input.
    """
    e, n, t = share.element, share.tokens, share.tp
    stream = hidden_bytes(model, share, casts=casts)
    hidden = e * n / t * model.dim
    given = hidden if gathers_again else e * n * model.dim
    projected = e * n * projected_width(model) / t
    mixed = e * n * model.n_heads * (model.latent.value_dim if model.latent else model.head_dim) / t
    sums = SUMS_BYTES * n * model.n_heads / t
    inner = e * inner_tokens_width(model, share, dense=dense)
    # A gated feed-forward keeps gate, activation, the other factor and the product; a fused kernel keeps no activation.
    times = (3 if share.fused else 4) if model.gated else 2
    # What experts get; and what they return, unless Megatron's activation has weighted it.
    sent = 0.0 if dense or model.experts is None else e * expert_rows(model, share) * model.dim
    # Torch's code also keeps it, weighted in fp32 or with its sum, on its way.
    routed = sent if gathers_again else 3 * sent
    norms = 2 * stream + (5 if casts else 2) * given + 2 * SUMS_BYTES * n / t
    scores = 0.0 if share.fused_attention else SCORE_BYTES * n * share.seq_len * model.n_heads / t
    attention = projected + sums if share.fused_attention else 3 * mixed + scores
    attention += e * n * (model.n_heads + model.n_kv_heads) * model.head_dim / t if model.query_norm else 0.0
    # A ring adds up its pieces in another order of dimensions than the output product's, which gets a copy.
    copied = 0.0 if share.cp == 1 or gathers_again else mixed
    everything = norms + attention + mixed + copied + times * inner + routed
    key_value = e * n * (projected_width(model) - model.n_heads * attention_width(model)) / 2 / t
    # Selective checkpointing keeps the output of every second product; of the last one, its sum over tensor ranks.
    attended = mixed + sums if share.fused_attention else 0.0
    by_operator = stream + given + mixed + attended + key_value + inner + routed
    return LayerMemory(
        none=everything, selective=by_operator, full=stream, workspace=3 * inner + 2 * hidden + given,
        # First, gradients of both factors and of the product. Then those of the activation and of the inputs, while
        # attention's tensors are still there, and three more of its scores' size in the backward of softmax. At the
        # end, those of queries, keys and values.
        after_product=2 * inner + stream, after_feed_forward=(1 - times) * inner + 2 * given + stream + 3 * scores,
        after_layer=projected + 2 * stream - everything,
        delayed=(2 if model.gated else 1) * inner + projected + 3 * hidden,
    )  # fmt: skip


def loss_bytes(model: ModelSpec, share: Share, *, splits_loss: bool = False) -> float:
    """Bytes at the loss: the logits, their softmax and its gradient, in fp32 unless they are fused. If torch's
    ``loss_parallel()`` splits it by vocabulary, the gradient takes two more steps in memory of their own.
    """
    logits = share.tokens * model.vocab / share.tp
    if share.fused:
        return logits * (share.element * 2 + 4)
    return logits * (16 if splits_loss else 12)


PARTS = ("masters", "optimizer", "gradients", "unsharded", "activations", "workspace")
MOST_GATHERED = 3
"""Stages that torch's schedules of several stages a rank keep gathered at a time."""


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
        """Bytes that are allocated at the peak."""
        total: Floats = sum((getattr(self, part) for part in PARTS), start=np.zeros_like(self.masters))
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """What one rank of each configuration holds, one entry a row.

    Elements:

    - ``parameters``: all of them; ``experts``: those of experts; ``unit``: those of the largest unit.
    - ``shapes``: the same, but in Megatron one expert's alone: products add gradients up, and give autograd an empty
      tensor for each shape.
    - ``feed_forward``: those of that unit's feed-forward; ``down``: those of its last product (of a counted module,
      those that have come ``after_feed_forward`` and ``after_product``).
    - ``prefetched``: what FSDP2 has gathered of the last block at the loss, which it does if the module computes that.
    - ``embedding``, ``head``: 0 if another pipeline rank has them; in a tied model the embedding is also the head.
    - ``looked_up``: the embedding's whole gradient.
    - ``trained``, ``trained_embedding``, ``trained_head``: those that are not frozen. ``head_gradient``: those of the
      gradient that the loss's backward computes first.
    - ``casts``: weights that autocast casts once for forward and backward; ``recasts``: those of checkpointed layers,
      which it casts for each.

    Bytes:

    - ``state``: those of the optimizer for each element that it updates.
    - ``kept``: what a layer keeps for backward, on average.
    - ``first``: what the first layer keeps, which is checkpointed if any layer is; ``last``: what the last layer keeps,
      which is checkpointed only if all are.
    - ``recomputed``: activations that a checkpointed layer recomputes; ``workspace``: a layer's workspace.
    - ``after_product``, ``after_feed_forward``, ``after_layer``, ``delayed``: as in :class:`LayerMemory`.
    - ``loss``: all that the loss needs, ``cast_loss``: before its gradient, if autocast casts; ``logits``: the logits
      alone; ``of_head``: what the gradient of the head's weight needs.
    - ``scattering``: workspace of the embedding's gradient.
    - ``outputs``: pipeline outputs that the rank still holds, or what is kept before the blocks of a counted module;
      ``messages``: receive buffers.

    Counts (microbatches may be fractions, if a rank has several stages):

    - ``layers``: layers of the rank; ``active``: those that backward reaches, since they or earlier ones are trained.
    - ``in_flight``: microbatches in flight; ``in_flight_later``: when the first layers end their first backward.
    - ``delays``: microbatches for which a zero-bubble schedule has yet to compute weight gradients.
    """

    parameters: Floats
    experts: Floats
    unit: Floats
    shapes: Floats
    feed_forward: Floats
    down: Floats
    prefetched: Floats
    embedding: Floats
    head: Floats
    looked_up: Floats
    trained: Floats
    trained_embedding: Floats
    trained_head: Floats
    head_gradient: Floats
    casts: Floats
    recasts: Floats
    state: Floats
    kept: Floats
    first: Floats
    last: Floats
    recomputed: Floats
    workspace: Floats
    after_product: Floats
    after_feed_forward: Floats
    after_layer: Floats
    delayed: Floats
    loss: Floats
    cast_loss: Floats
    logits: Floats
    of_head: Floats
    scattering: Floats
    outputs: Floats
    messages: Floats
    layers: Floats
    active: Floats
    in_flight: Floats
    in_flight_later: Floats
    delays: Floats


def memory_of(candidates: Candidates, ranks: Sequence[Held], element: Floats, reduction: Floats) -> Memory:
    """The highest moment of the rank that needs most. ``element`` and ``reduction`` are bytes of a parameter in compute
    and of a gradient as it is reduced.
    """
    return highest([moment for held in ranks for moment in _Rank(candidates, held, element, reduction).moments()])


def highest(moments: Sequence[Memory]) -> Memory:
    """The moment of each row that has the highest peak."""
    at = np.argmax([moment.peak for moment in moments], axis=0)
    rows = np.arange(len(at))
    return Memory(**{part: np.array([getattr(moment, part) for moment in moments])[at, rows] for part in PARTS})


class _Rank:
    """The moments of a step of one rank at which its memory may be highest."""

    def __init__(self, candidates: Candidates, held: Held, element: Floats, reduction: Floats) -> None:
        self._candidates, self._held, self._element, self._reduction = candidates, held, element, reduction
        self._parts = candidates["interleave"].astype(np.float64)
        sharded = (held.parameters - held.experts) / candidates.shards + held.experts / candidates.expert_shards
        self._own = np.where(self._is("shards_optimizer"), sharded, held.parameters)
        self._own_trained = self._own * held.trained / np.maximum(1, held.parameters)
        self._by_unit, self._around = self._is("shards_parameters"), self._is("around")
        self._casts = self._is("casts") & (element < MASTER_BYTES)
        self._buckets = candidates.cost("summed_bytes") > MASTER_BYTES
        self._pipelined, self._offload = candidates["pp"] > 1, candidates.flag("offload")
        self._several = candidates["microbatches"] > 1
        self._stays = self._by_unit & (self._pipelined | ~candidates.flag("reshard") | self._is("keeps"))
        self._activations = held.active * held.kept * held.in_flight + held.outputs
        self._activations = self._activations + held.layers * held.delayed * held.delays
        # When the first layers of a pipeline's rank end their first backward.
        later = self._activations - held.layers * held.kept * (held.in_flight - held.in_flight_later)
        self._later = np.where(self._pipelined, later, held.outputs)
        # In backward a gathered unit has been copied out before the next one is gathered.
        copies = candidates.cost("copies_out") * element
        slots = candidates.cost("parameter_slots") * element + copies - np.where(self._around, copies, 0)
        self._gathered = np.where(self._by_unit & ~self._stays, slots, 0) * held.unit
        # Weights as autocast casts them, once per microbatch; the head's for one, since the loss follows at once.
        cast = held.casts * held.in_flight - held.head * np.maximum(0, held.in_flight - 1)
        self._autocast = np.where(self._casts, element, 0) * cast
        self._whole = self._all_whole()
        self._gradients = self._all_gradients()
        self._gradients_at_loss = self._gradients - self._coming()

    def _is(self, field: str) -> Mask:
        return self._candidates.cost(field) > 0

    def moments(self) -> list[Memory]:
        """All of them."""
        return [
            self._loss(),
            self._cast_loss(),
            # The backward of the last layer, when all activations are there.
            self._moment(self._gradients_at_loss, self._whole, self._activations, self._of_layer(self._held.last)),
            self._first_layer(),
            self._embedding(),
            self._reducing(),
            self._stepping(),
        ]

    def _loss(self) -> Memory:
        """The loss and its gradient, or those of the head's weight."""
        held, element, reduction = self._held, self._element, self._reduction
        end = np.maximum(held.embedding, held.head)
        units = self._by_unit & ~self._around & ~self._stays
        gathered = np.where(units, element * end, 0) + np.where(self._is("holds_last"), element * held.unit, 0)
        gathered = gathered + np.where(self._around & ~self._stays, element * held.prefetched, 0)
        delayed = held.logits * np.maximum(0, held.delays * self._parts - 1) + self._not_added()
        of_head = held.of_head + np.where(self._by_unit & ~self._around, reduction * held.head_gradient, 0)
        workspace = gathered + delayed + np.maximum(held.loss, of_head)
        begun = held.layers * held.delayed * np.minimum(held.delays, 1 / self._parts)
        return self._moment(
            self._gradients_at_loss + self._first_bucket(), self._whole, self._activations - begun,
            np.where(held.loss > 0, workspace, 0),
        )  # fmt: skip

    def _not_added(self) -> Floats:
        """Gradients of weights that a zero-bubble schedule computed last: FSDP2 adds a stage's to those of earlier
        microbatches, in fp32, in the stage's next backward. With several stages a rank, those of one stage have none of
        earlier microbatches until the third round.
        """
        held, alone = self._held, self._parts == 1
        early = ~alone & (self._candidates["microbatches"] < 3 * self._candidates["pp"])
        stage = held.layers / self._parts * held.unit
        waiting = self._element * (stage + np.where(alone, held.head, 0)) - np.where(early, MASTER_BYTES * stage, 0)
        found: Floats = np.where((held.delays > 0) & self._by_unit, waiting, 0)
        return found

    def _cast_loss(self) -> Memory:
        """The loss before its gradient: autocast still has all weights that forward cast, and the logits are there in
        both dtypes, with the result of softmax.
        """
        held, element = self._held, self._element
        here = self._casts & ~self._pipelined & (held.loss > 0)
        recast, workspace = np.where(here, element * held.recasts, 0), np.where(here, held.cast_loss, 0)
        return self._moment(
            self._gradients_at_loss + self._first_bucket(), self._whole + recast, self._activations, workspace
        )

    def _first_layer(self) -> Memory:
        """The backward of the first layer, when all gradients are there; in a pipeline, of the first microbatch."""
        whole = self._whole - np.where(self._pipelined, 0, self._autocast)
        return self._moment(self._gradients, whole, self._held.first + self._later, self._of_layer(None))

    def _embedding(self) -> Memory:
        """The embedding's gradient, whole on each of torch's tensor-parallel ranks."""
        held, element = self._held, self._element
        split = ~self._pipelined & (held.looked_up > held.embedding)
        after = np.maximum(held.scattering, np.where(split, element * held.embedding, 0))
        gradient = np.where(self._casts, MASTER_BYTES, element) * held.looked_up + after
        # A zero-bubble schedule computes it with the gradients of the layers' weights, which wait for it.
        gradient = gradient + element * held.unit * held.layers * held.delays
        before = np.where(self._pipelined, 0, element * held.trained_head + self._reduction * held.unit)
        here = (held.trained_embedding > 0) & (self._pipelined | self._by_unit & self._around)
        return self._moment(
            self._gradients, self._whole - np.where(self._pipelined, 0, self._autocast), self._later,
            np.where(here, gradient + before, 0),
        )  # fmt: skip

    def _reducing(self) -> Memory:
        """The reduction of what lies around the layers, or of a pipeline's stage, after the last backward."""
        held, element, reduction = self._held, self._element, self._reduction
        ends, trained = held.embedding + held.head, held.trained_embedding + held.trained_head
        extra = held.looked_up - held.embedding
        alone = (element + reduction) * trained
        stage = np.maximum(ends, held.unit)
        stage = np.maximum(reduction * (stage - extra), np.where(extra > 0, reduction * held.embedding, 0))
        here = self._by_unit & (self._around | self._pipelined)
        freed = np.where(self._pipelined, element * np.where(ends > 0, ends, held.unit), element * ends)
        reduced = here & ~self._several & ~self._offload
        gradients = self._gradients - np.where(reduced, MASTER_BYTES * trained / self._candidates.shards, 0)
        whole = self._whole - np.where(here, np.minimum(freed, self._whole), 0)
        return self._moment(
            gradients, whole, np.zeros_like(whole), np.where(here, np.where(self._pipelined, stage, alone), 0)
        )  # fmt: skip

    def _stepping(self) -> Memory:
        """The step of Adafactor, which computes one tensor's update at a time."""
        held, none = self._held, np.zeros_like(self._whole)
        largest = np.maximum.reduce([held.embedding, held.head, held.down])
        update = np.where(self._candidates.where("optimizer", "adafactor"), MASTER_BYTES * largest, 0)
        return self._moment(self._gradients, self._whole - self._autocast, none, update)

    def _of_layer(self, after: Floats | None) -> Floats:
        """A layer's backward. ``after`` is what the layer after it kept, if that is still counted."""
        held, element, reduction = self._held, self._element, self._reduction
        # In a unit around others, gradients come one by one and wait for the last, and the head's are there by then.
        # Gradients of the layer after it are still in the buffer that they are reduced from.
        grown = [
            held.after_product + element * held.down,
            held.after_feed_forward + element * held.feed_forward,
            held.after_layer + element * held.unit,
        ]
        # Before the first layer there is none to gather ahead, unless it is frozen.
        none_ahead = held.active == held.layers
        ahead = np.where(none_ahead, element * held.unit, 0) if after is None else 0
        gathered = np.maximum(0, self._gathered - ahead)
        most = held.recomputed + gathered + element * held.trained_head + np.maximum.reduce(grown)
        later = reduction * held.unit - (0 if after is None else after)
        within = np.where(self._stays, most, most + np.maximum(later, 0))
        # Otherwise, while a layer computes, its activations are there, and parameters of the next; at its end, its
        # gradients as they came and as they are reduced, and a third of the workspace: about one of its three tensors
        # of the feed-forward's width.
        came = element * held.shapes
        reduced = np.where(self._by_unit, element + reduction, 0) * held.unit
        working = np.maximum(held.workspace, held.after_feed_forward)
        computing = held.recomputed + working + self._gathered + came
        ending = np.where(self._stays, 0, 2 * came)
        alone = np.maximum(computing, reduced + ending + held.workspace / 3)
        found = np.where(self._casts, held.recomputed + held.after_product, np.where(self._around, within, alone))
        return np.where(held.active > 0, found, 0)

    def _all_gradients(self) -> Floats:
        """Gradients that a step leaves: sharded, or summed unsharded. Torch sums a pipeline's in fp32 and shards them
        in the end; DDP's are views of its buckets unless some microbatches add up next to them.
        """
        held = self._held
        whole = held.trained + np.where(held.trained_embedding > 0, held.looked_up - held.embedding, 0)
        summed = self._candidates.cost("summed_bytes")
        summed = summed - np.where(self._casts & ~self._several & self._buckets, MASTER_BYTES, 0)
        found = np.where(self._by_unit, MASTER_BYTES * self._own_trained, summed * held.trained)
        once = self._by_unit & self._several & ~self._pipelined & ~self._candidates.flag("reduce_each")
        found = found + np.where(once, MASTER_BYTES * whole, 0)
        found = np.where(self._by_unit & self._pipelined, MASTER_BYTES * whole, found)
        return np.where(self._offload & self._by_unit, 0, found)

    def _first_bucket(self) -> Floats:
        """The one bucket of DDP's first step, which NCCL holds in the second until one of the later ones is reduced.

        With several stages a rank, the last one's is gone by then: another stage's backward came before.
        """
        held, parts = self._held, self._parts
        bucket = np.where(parts > 1, held.layers * held.unit * (1 - 1 / parts), held.trained)
        return np.where(self._is("casts") & self._buckets, MASTER_BYTES * bucket, 0)

    def _coming(self) -> Floats:
        """Gradients that are not there before the backward of a step's first microbatch; later ones find them there."""
        held = self._held
        none = self._is("casts") & ~self._buckets
        only = ~self._several & (self._by_unit | none)
        # A pipeline with no more microbatches than it holds at once has none before some of them go.
        filling = self._pipelined & (self._candidates["microbatches"] <= held.in_flight)
        comes = (only | filling) & (self._by_unit | self._buckets | none)
        kept = np.where(self._by_unit | none, 0, MASTER_BYTES * held.trained)
        return np.where(comes & ~self._offload, self._gradients - kept, 0)

    def _all_whole(self) -> Floats:
        """Parameters in the dtype of compute that stay, those around the layers among them."""
        held, element = self._held, self._element
        some = np.minimum(1, MOST_GATHERED / self._parts)
        ends = np.where(self._around & ~self._stays, element * (held.embedding + held.head), 0)
        kept = self._candidates.cost("kept_bytes") * held.parameters + self._autocast
        found: Floats = np.where(self._stays, element * held.parameters * some, kept) + ends
        return found

    def _frozen_bytes(self) -> Floats:
        """Bytes of frozen parameters that each rank has between steps, but for whole copies that it keeps. Of the
        engine's, a copy is the parameter itself, if its unit has nothing that is trained; the head's has a norm.
        """
        held, frozen = self._held, self._own - self._own_trained
        cast = self._element * np.where(self._is("shards_optimizer"), frozen, held.head - held.trained_head)
        found: Floats = np.where(self._is("casts_frozen"), cast, MASTER_BYTES * frozen)
        return found

    def _moment(self, gradients: Floats, unsharded: Floats, activations: Floats, workspace: Floats) -> Memory:
        return Memory(
            masters=np.where(self._offload, 0, MASTER_BYTES * self._own_trained + self._frozen_bytes()),
            optimizer=np.where(self._offload, 0, self._held.state * self._own_trained),
            gradients=gradients, unsharded=unsharded, activations=activations,
            workspace=workspace + self._held.messages,
        )  # fmt: skip
