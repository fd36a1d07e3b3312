"""Step time and memory of many configurations of one model on one cluster, one entry a row."""

from dataclasses import dataclass, fields
from functools import cached_property

import msgspec
import numpy as np

from refshard.errors import SpecError
from refshard.plan.adapters import TunedLayer, tuned_layer
from refshard.plan.collectives import Elements, Exchanges, group_of
from refshard.plan.cost_models import MASTER_BYTES, NEWTON_SCHULZ, STATE_BYTES, UPDATED_BYTES
from refshard.plan.counted import CountedCosts, check_counted, counted_memory
from refshard.plan.kernels import Share, attention_linears, feed_forward_linears, hidden_bytes, sizes_of
from refshard.plan.layers import LayerCosts, LayerTimes, Within
from refshard.plan.memory import PARTS, Held, LayerMemory, Memory, highest, layer_memory, loss_bytes, memory_of
from refshard.plan.space import Candidates, Floats, Integers, by_distinct
from refshard.plan.stages import deal, delayed_weights, held_by_first_backward, in_flight, step_seconds
from refshard.specs.cluster import ClusterSpec
from refshard.specs.counted import AnyModel, CountedModel, Counts
from refshard.specs.hardware import ELEMENT_BYTES
from refshard.specs.job import Policy
from refshard.specs.layers import checkpointing_of
from refshard.specs.model import ModelSpec, makes_scores
from refshard.specs.tuning import Frozen, Lora, frozen_of, projections_of

CLIPPED_BYTES = 12
"""Bytes that clipping reads and writes of each fp32 gradient: once for its norm, once more to scale it."""
_TIMES = tuple(field.name for field in fields(LayerTimes))
_MEMORY = tuple(field.name for field in fields(LayerMemory))
_TUNED = tuple(field.name for field in fields(TunedLayer))
_COUNTED = ("down", "feed_forward", "outputs", "cast_loss", "of_head")
"""Fields of :class:`CountedMemory` and of :class:`Held` that have formulas of their own for other models."""
_SHARE = (
    "microbatch", "tp", "cp", "ep", "expert_tp", "precision", "compiled", "fused_norms", "attention", "tuning",
    "lora_rank", "lora_targets", "overlap_tensor", "context_by", "dispatch", "fp8_attention", "fp8_head",
    "fused_experts", "graphs", "recomputes",
)  # fmt: skip
"""Fields on which a layer's time and memory depend."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """Columns in the order of ``candidates``; seconds are of a step.

    - ``compute_s``: the slowest rank's kernels, and the communication within its layers.
    - ``exchange_s``: exposed communication and copies of data parallelism.
    - ``waiting_s``: waiting for other ranks of the pipeline.
    - ``optimizer_s``: the optimizer step, with clipping.
    - ``straggling_s``: waiting for ranks that are late at a collective or at the end of the step.

    ``host_bytes`` are those of a node's memory that offloading takes.
    """

    candidates: Candidates
    step_s: Floats
    compute_s: Floats
    exchange_s: Floats
    waiting_s: Floats
    optimizer_s: Floats
    straggling_s: Floats
    memory: Memory
    host_bytes: Floats


def estimate(model: AnyModel, cluster: ClusterSpec, seq_len: int, candidates: Candidates) -> Estimates:
    """Estimate all rows; those of different world sizes lie on as many of the cluster's nodes as they fill."""
    return _Estimate(model, cluster, seq_len, candidates).all()


def memory(model: AnyModel, cluster: ClusterSpec, seq_len: int, candidates: Candidates) -> Memory:
    """The memory of :func:`estimate` alone, which takes less time."""
    return _Estimate(model, cluster, seq_len, candidates).memory()


class _Estimate:
    def __init__(self, model: AnyModel, cluster: ClusterSpec, seq_len: int, candidates: Candidates) -> None:
        self._model, self._seq_len, self._rows = model, seq_len, candidates
        if isinstance(model, CountedModel):
            check_counted(model, candidates)
            self._cluster = cluster
        else:
            self._cluster = msgspec.structs.replace(cluster, hardware=cluster.accelerator.as_in_closed_forms)
        self._stages = deal(model.n_layers, candidates)
        self._reduction = candidates.mapped("reduction", lambda word: float(ELEMENT_BYTES[word]))  # type: ignore[index]
        self._element = np.where(candidates.where("precision", "fp32"), 4.0, 2.0)
        self._megatron = candidates.where("strategy", "megatron")
        self._alone = candidates["pp"] == 1
        # A model may have some dense layers and mixtures of experts in the others: figures are of the average layer.
        self._routed = model.expert_layers / model.n_layers
        # Dense layers come first, or alternate, and those of the first stage count. The part that are mixtures, of a
        # pipeline's first rank and others.
        dense, every = (model.experts.dense_layers, model.experts.every) if model.experts else (0, 1)
        first, some = np.maximum(1, self._stages.first), float(self._routed > 0) / every
        before = np.minimum(dense, self._stages.begin)
        self._routed_first = np.where(self._alone, self._routed, some * np.maximum(0, first - before) / first)
        self._routed_later = np.where(self._alone, self._routed, some)
        self._sizes()

    def _sizes(self) -> None:
        rows, model, stages = self._rows, self._model, self._stages

        def sizes(tensor: int, expert: int, expert_tp: int) -> tuple[float, ...]:
            if isinstance(model, CountedModel):
                return model.block, 0.0, 0.0, 0.0, model.embedding, model.head
            found = sizes_of(model, tensor, expert, expert_tp)
            return found.dense, found.routed, found.experts, found.feed_forward, found.embedding, found.head

        self._dense, self._plain, self._experts, self._feed_forward, self._embedding, self._head = by_distinct(
            [rows["tp"], rows["ep"], rows["expert_tp"]], sizes
        )
        if model.predictions:
            # A pipeline's last rank has the embedding, too, for the next tokens.
            self._head = self._head + np.where(self._alone, 0, self._embedding)
        mixed = self._plain + self._experts > self._dense
        self._unit = Elements(np.where(mixed, self._plain, self._dense), np.where(mixed, self._experts, 0))
        if isinstance(model, CountedModel):
            self._unit = Elements(np.full(len(rows), float(model.largest)), np.zeros(len(rows)))
        self._looked_up = self._embedding * np.where(self._megatron, 1, rows["tp"])
        slowest = np.maximum(stages.middle, np.maximum(stages.first, stages.last))
        self._layers = np.where(self._alone, model.n_layers, slowest)
        alone, between = np.where(self._alone, model.n_layers, stages.first), rows["pp"] > 2
        ends = [self._embedding + np.where(self._alone, self._head, 0), np.zeros_like(self._head), self._head]
        held = [
            self._held_elements(layers, part, end)
            for layers, part, end in zip(
                (alone, np.where(between, stages.middle, 0), np.where(self._alone, 0, stages.last)),
                (self._routed_first, self._routed_later, self._routed_later), ends,
            )
        ]  # fmt: skip
        most, at = np.argmax([one.all for one in held], axis=0), np.arange(len(rows))
        rest, experts = np.array([one.rest for one in held]), np.array([one.experts for one in held])
        self._parameters = Elements(rest[most, at], experts[most, at])
        divided = rows.cost("shards_optimizer") > 0
        sharded = self._parameters.rest / rows.shards + self._parameters.experts / rows.expert_shards
        self._own = np.where(divided, sharded, self._parameters.all)
        # Elements that the rank's optimizer updates.
        self._tuned, self._updated = ~rows.where("tuning", "full"), self._own
        if self._tuned.any():
            self._check_tuned()
            adapters = model.n_layers * self._tuned_layers["adapters"]
            self._updated = np.where(self._tuned, adapters / np.where(divided, rows.shards, 1), self._own)
        self._freeze()

    def _freeze(self) -> None:
        """Count the layers that backward reaches, and the elements that are trained.

        Raises:
            SpecError: the closed forms of frozen parts do not hold for these rows.
        """
        rows, model, parts = self._rows, self._model, [frozen_of(parts) for parts in self._rows.labels["frozen"]]
        if any(part.layers > model.n_layers for part in parts):
            raise SpecError(f"frozen: first-N must be at most the model's {model.n_layers} layers, got more")
        if model.experts and any(part != Frozen() for part in parts):
            raise SpecError("frozen: parts of a mixture of experts have no closed form; dry-run your own script")

        def of(field: str) -> Floats:
            return rows.mapped("frozen", lambda words: float(getattr(frozen_of(words), field)))

        embedding, head = of("embedding") > 0, of("head") > 0
        tied, last_norm = (False, 0) if isinstance(model, CountedModel) else (model.tied, model.dim)
        if tied:
            embedding = head = embedding | head
        self._frozen_layers = of("layers")
        self._trained_embedding = np.where(embedding, 0, self._embedding)
        self._frozen_head, self._trained_head = head, np.where(head, last_norm, self._head)
        ends = self._embedding + self._head - self._trained_embedding - self._trained_head
        self._frozen = self._frozen_layers * self._dense + np.where(embedding | head, ends, 0)
        self._updated = self._updated * (1 - self._frozen / self._parameters.all)

    def _check_tuned(self) -> None:
        """Check that the closed forms of adapters hold for these rows.

        Raises:
            SpecError: they do not.
        """
        if self._model.experts:
            raise SpecError("tuning: adapters of a mixture of experts have no closed form; dry-run your own script")
        if self._rows.flag("offload")[self._tuned].any():
            raise SpecError("offload: with adapters it has no closed form; leave it out")
        if any((self._rows[axis][self._tuned] > 1).any() for axis in ("tp", "cp", "pp", "ep")):
            raise SpecError("tuning: adapters have closed forms of data parallelism alone; leave tp, cp, pp, ep at 1")

    @cached_property
    def _tuned_layers(self) -> dict[str, Floats]:
        """The fields of :class:`TunedLayer`, and bytes of the loss and of hidden states; 0 in rows that train
        everything.
        """

        def layer(*key: int) -> tuple[float, ...]:
            share = self._share(*key)
            if share.lora is None or isinstance(self._model, CountedModel):
                return (0.0,) * (len(_TUNED) + 2)
            one = tuned_layer(self._model, share)
            found = [getattr(one, name) for name in _TUNED]
            return (*found, loss_bytes(self._model, share), hidden_bytes(self._model, share))

        return dict(zip([*_TUNED, "loss", "hidden"], by_distinct([self._rows[field] for field in _SHARE], layer)))

    def _held_elements(self, layers: Integers, routed: Floats, end: Floats) -> Elements:
        """Elements of a rank with so many layers, of which this part are mixtures, and with this at the ends."""
        plain = self._dense * (1 - routed) + self._plain * routed
        return Elements(layers * plain + end, layers * routed * self._experts)

    def all(self) -> Estimates:
        rows, stages, model = self._rows, self._stages, self._model
        dense_s, mixed_s, embedding_s, head_s, prediction_s = self._layer_times()
        head_s = head_s + model.predictions * prediction_s
        full, some = self._checkpointed()
        routed = self._routed
        layer_s = {name: dense_s[name] * (1 - routed) + mixed_s[name] * routed for name in _TIMES}

        def backward_of(times: dict[str, Floats]) -> Floats:
            recomputed = full * times["full_s"] + some * times["selective_s"]
            return times["input_s"] + times["weight_s"] + recomputed

        layer_forward_s, layer_backward_s = layer_s["forward_s"], backward_of(layer_s)
        longer = mixed_s["forward_s"] + backward_of(mixed_s) - dense_s["forward_s"] - backward_of(dense_s)
        unit, by_unit = self._unit, rows.cost("by_unit") > 0
        trained = np.where(by_unit, 1.0, 1 - self._frozen / self._parameters.all)
        if self._tuned.any():
            of = self._tuned_layers
            gathered = of["frozen"] / self._element + of["adapters"]
            unit = Elements(np.where(self._tuned, gathered, unit.rest), np.where(self._tuned, 0, unit.experts))
            trained = np.where(self._tuned, of["adapters"] / np.maximum(1, gathered), trained)
        exchanges = Exchanges(self._cluster, rows, self._reduction, trained)
        embedding_s = embedding_s + np.where(self._trained_embedding > 0, exchanges.adding(self._looked_up), 0)
        head_s = head_s + np.where(self._frozen_head, 0, exchanges.adding(self._head))
        exchange = exchanges.of(
            unit, self._embedding + self._head, self._parameters, layer_forward_s, layer_backward_s, self._layers
        )
        forward, backward = layer_forward_s + exchange.layer_forward_s, layer_backward_s + exchange.layer_backward_s
        layer, ends = forward + backward, embedding_s + head_s
        later = layer + (self._routed_later - routed) * longer
        first = stages.first * (layer + (self._routed_first - routed) * longer) + embedding_s
        last = stages.last * later + head_s
        everyone = model.n_layers * layer + ends - self._frozen_layers * backward
        slowest = np.where(self._alone, everyone, np.maximum(stages.middle * later, np.maximum(first, last)))
        slowest = slowest + self._messages(exposed=True)
        weight = layer_s["weight_s"] * self._layers
        pipelined, waiting = step_seconds(rows, slowest, np.maximum(everyone, slowest), weight)
        filling = (rows["pp"] - 1) * exchanges.first_gathers(unit, layer_forward_s, self._layers)
        messages = self._messages(exposed=False)
        kernels: Floats = np.where(
            self._alone,
            model.n_layers * (layer_forward_s + layer_backward_s) + ends - self._frozen_layers * layer_backward_s,
            slowest - self._layers * (exchange.layer_forward_s + exchange.layer_backward_s),
        )  # fmt: skip
        compute = rows["microbatches"] * kernels
        optimizer = self._optimizer()
        host = self._host_copies(compute)
        steady = pipelined + filling + exchange.step_s + optimizer + messages + host
        skew = rows["microbatches"] * self._layers * exchange.layer_skew_s
        nodes = np.maximum(1, rows["gpus"] / self._cluster.ranks_per_node)
        straggling = skew + (steady + skew) * self._cluster.straggling * np.log2(nodes)
        return Estimates(
            candidates=rows, step_s=steady + straggling, compute_s=compute, waiting_s=waiting + filling + messages,
            exchange_s=pipelined - waiting - compute + exchange.step_s + host, optimizer_s=optimizer,
            straggling_s=straggling, memory=self.memory(), host_bytes=self._host_bytes(),
        )  # fmt: skip

    def _layer_times(self) -> tuple[dict[str, Floats], dict[str, Floats], Floats, Floats, Floats]:
        """Seconds of a dense layer and of a mixture by field of :class:`LayerTimes`, of the embedding, of the head, and
        of a module of multi-token prediction besides its layer.
        """
        rows, model, cluster = self._rows, self._model, self._cluster

        def times(megatron: int, casts: int, *key: int) -> tuple[float, ...]:
            if isinstance(model, CountedModel):
                parts = CountedCosts(cluster.accelerator, self._counts(model, bool(casts), *key))
                block = [getattr(parts.layer(), name) for name in _TIMES]
                return (*block, *block, *parts.ends(), *[0.0] * 4)
            share, (overlaps, by, dispatch, fp8_attention, fp8_head, fused_experts, graphs, recomputes) = (
                self._share(*key), key[-8:]
            )  # fmt: skip
            experts, given = group_of(cluster, share.ep, share.expert_split), rows.labels["dispatch"][dispatch]
            own = "copies" if not megatron else "once-overlapped" if experts.nodes > 1 else "once"
            within = Within(
                tensor_shape=group_of(cluster, share.tp, 1),
                context_shape=group_of(cluster, share.cp, share.tp),
                expert_shape=experts, split_shape=group_of(cluster, share.expert_split, 1),
                dispatch=own if given == "default" else given,  # type: ignore[arg-type]
                fp8_attention=bool(fp8_attention), fp8_head=bool(fp8_head),
                fused_experts=bool(fused_experts), recomputes=rows.labels["recomputes"][recomputes],
                graphs=rows.labels["graphs"][graphs],  # type: ignore[arg-type]
                overlaps=bool(overlaps), exchanges=rows.labels["context_by"][by] == "exchange", dtensors=not megatron,
            )  # fmt: skip
            costs = LayerCosts(model, cluster, share, within)
            dense = costs.layer(dense=True)
            mixed = costs.layer(dense=False) if self._routed else dense
            layers = [getattr(kind, name) for kind in (dense, mixed) for name in _TIMES]
            ends = [costs.embedding(), costs.head(), costs.prediction()]
            return (*layers, *(part.forward_s + part.backward_s for part in ends), *(part.weight_s for part in ends))

        *layers, embedding, head, prediction, looked_up, weight, _ = by_distinct(self._parts(), times)
        embedding = embedding - np.where(self._trained_embedding > 0, 0, looked_up)
        head = head - np.where(self._frozen_head, weight, 0)
        return dict(zip(_TIMES, layers)), dict(zip(_TIMES, layers[len(_TIMES) :])), embedding, head, prediction

    def _parts(self) -> list[Integers]:
        """What the time and the memory of layers and ends depend on: Megatron, autocast, and the fields of a share."""
        rows = self._rows
        casts = (rows.cost("casts") > 0) & ~rows.where("precision", "fp32")
        return [self._megatron.astype(np.int64), casts.astype(np.int64), *(rows[field] for field in _SHARE)]

    def _counts(self, model: CountedModel, casts: bool, *key: int) -> Counts:
        return model.of(key[0], self._rows.labels["precision"][key[_SHARE.index("precision")]], casts=casts)

    def _share(self, microbatch: int, tp: int, cp: int, ep: int, expert_tp: int, precision: int, compiled: int,
               fused_norms: int, attention: int, tuning: int, rank: int, targets: int, *_: int) -> Share:  # fmt: skip
        device, labels, model = self._cluster.accelerator.device, self._rows.labels, self._model
        name, tuned = labels["precision"][precision], labels["tuning"][tuning]
        lora = None if tuned == "full" else Lora(rank=rank, projections=projections_of(labels["lora_targets"][targets]))
        return Share(
            sequences=microbatch, seq_len=self._seq_len, tp=tp, cp=cp, ep=ep, expert_tp=expert_tp,
            precision=name,  # type: ignore[arg-type]
            fused=bool(compiled), fused_norms=bool(fused_norms) and device == "cuda",
            fused_attention=not (
                isinstance(model, ModelSpec) and makes_scores(model, fp32=name == "fp32", device=device)
            ),
            attention=labels["attention"][attention],  # type: ignore[arg-type]
            lora=lora, quantised=tuned == "qlora",
        )  # fmt: skip

    def _checkpointed(self) -> tuple[Floats, Floats]:
        """The part of a rank's layers that recompute everything, and the part that recompute by operator."""
        rows = self._rows
        some = rows.where("checkpointing", "selective").astype(np.float64)
        numbers = rows.mapped("checkpointing", lambda policy: float(policy[6:]) if policy.startswith("first-") else 0.0)
        every = rows.mapped("checkpointing", lambda p: 1 / float(p[6:]) if p.startswith("every-") else 0.0)
        full = np.where(rows.where("checkpointing", "full"), 1.0, every)
        return np.minimum(1.0, np.maximum(full, numbers / self._layers)), some

    def _messages(self, *, exposed: bool) -> Floats:
        """Seconds of a pipeline's messages: of a microbatch if it waits for them, else of filling and draining."""
        rows, cluster = self._rows, self._cluster
        ranks, tensor = rows["pp"], rows["tp"]
        if isinstance(self._model, CountedModel):
            return np.zeros(len(rows))
        nbytes = rows["microbatch"] * self._seq_len / rows["cp"] / tensor * self._model.dim * self._element
        apart = rows["gpus"] // ranks >= cluster.ranks_per_node
        outer = cluster.between.bytes_per_s / cluster.ranks_per_node if cluster.between else cluster.within.bytes_per_s
        hop = cluster.launch_s + nbytes / np.where(apart, outer, cluster.within.bytes_per_s)
        waits = ~rows.flag("overlap_pipeline")
        times = 2 * np.where(waits, 1, 0) if exposed else 2 * (ranks - 1) * np.where(waits, 1, rows["interleave"])
        found: Floats = np.where(ranks > 1, times * hop, 0.0)
        return found

    def _optimizer(self) -> Floats:
        """Seconds of the optimizer over the rank's part, and of clipping its gradients; with offloading, all ranks of a
        node share its memory's rate.
        """
        rows, hardware, own = self._rows, self._cluster.accelerator, self._updated
        updated = rows.mapped("optimizer", lambda name: float(UPDATED_BYTES[name])) * own
        reached = hardware.optimizer_bytes_per_s or hardware.memory_bytes_per_s
        on_gpu = updated / reached + CLIPPED_BYTES * own / hardware.memory_bytes_per_s
        if (muon := rows.where("optimizer", "muon")).any() and isinstance(self._model, ModelSpec):
            rate, flops = hardware.matmul["bf16"], _newton_schulz_flops(self._model)
            on_gpu = on_gpu + np.where(muon, flops / (rate.peak * rate.efficiency), 0)
        if not rows.flag("offload").any():
            return on_gpu
        host = self._cluster.host_memory_bytes_per_s
        if not host:
            raise SpecError(
                "offload: the cluster's host_memory_bytes_per_s must be known, got 0; add it to the profile with its "
                "source"
            )
        on_node = np.minimum(rows["gpus"], self._cluster.ranks_per_node)
        return np.where(rows.flag("offload"), (updated + CLIPPED_BYTES * own) * on_node / host, on_gpu)

    def _host_bytes(self) -> Floats:
        """Bytes of a node's memory that offloading takes: masters, gradients and state of all of its ranks."""
        rows = self._rows
        on_node = np.minimum(rows["gpus"], self._cluster.ranks_per_node)
        return np.where(rows.flag("offload"), (2 * MASTER_BYTES + self._state()) * self._updated * on_node, 0.0)

    def _state(self) -> Floats:
        """Bytes of the optimizer's state for an element."""
        rows, model = self._rows, self._model
        state = rows.mapped("optimizer", STATE_BYTES.__getitem__)
        if isinstance(model, CountedModel):
            return state
        matrices = sum(m * n for m, n in _block_matrices(model)) * model.n_layers
        rest = 1 - matrices / model.params
        state = np.where(rows.where("optimizer", "muon"), state + rest * (STATE_BYTES["adamw"] - state), state)
        return np.where(rows.where("optimizer", "adafactor"), state * _factored_elements(model) / model.params, state)

    def _host_copies(self, compute_s: Floats) -> Floats:
        """Seconds per step for copies of masters from the host at each gather, and of gradients to it at each
        reduction; they overlap its compute.
        """
        rows, link = self._rows, self._cluster.accelerator.host_link_bytes_per_s
        offloaded = rows.flag("offload")
        if not offloaded.any():
            return np.zeros_like(compute_s)
        if not link:
            raise SpecError(
                "offload: the accelerator's host_link_bytes_per_s must be known, got 0; add it to the profile with its "
                "source"
            )
        by_unit = (rows.cost("by_unit") > 0) & self._alone
        gathers = np.where(by_unit, rows["microbatches"] * (1 + rows.flag("reshard")), 1)
        reductions = np.where(by_unit & rows.flag("reduce_each"), rows["microbatches"], 1)
        copied = self._own * (MASTER_BYTES * gathers + self._reduction * reductions)
        return np.where(offloaded, np.maximum(0, copied / link - compute_s), 0)

    def memory(self) -> Memory:
        """The memory of the rank that needs most: a pipeline's first, its second (unless that is the last) or last."""
        ranks, kept = self._rows["pp"], self._kept()
        held = [self._held(np.minimum(place, ranks - 1), kept) for place in (0, 1)] if ranks.max(initial=1) > 1 else []
        full = memory_of(self._rows, [*held, self._held(ranks - 1, kept)], self._element, self._reduction)
        if not self._tuned.any():
            return full
        tuned = self._tuned_memory()
        return Memory(**{part: np.where(self._tuned, getattr(tuned, part), getattr(full, part)) for part in PARTS})

    def _tuned_memory(self) -> Memory:
        """The same of rows that train adapters: the higher of the loss and the backward of the last layer."""
        rows, model, e, shards = self._rows, self._model, self._element, self._rows.shards
        of = self._tuned_layers
        layers, ends = model.n_layers, e * (self._embedding + self._head)
        frozen, zero = layers * of["frozen"] + ends, np.zeros_like(ends)
        divided, by_unit = rows.cost("shards_optimizer") > 0, rows.cost("shards_parameters") > 0
        stays = by_unit & ((rows.cost("keeps") > 0) | ~rows.flag("reshard"))
        gathers, around = by_unit & ~stays, rows.cost("around") > 0
        part, some = self._checkpointed()
        kept = (1 - part - some) * of["none"] + part * of["full"] + some * of["selective"]
        activations = layers * kept + of["hidden"] - np.where(part + some > 0, 0, of["unneeded"])
        recomputed = np.where(part > 0, of["none"], np.where(some > 0, of["none"] - of["selective"], 0))
        tied = isinstance(model, ModelSpec) and model.tied
        at_ends = np.where(around, ends, e * np.where(tied, self._embedding, self._head))
        last = np.where(rows.cost("holds_last") > 0, of["frozen"], 0)
        # FSDP1's flat parameter has a gradient as a whole, that of frozen weights with it.
        flat = np.where(rows.cost("divides") > 0, of["frozen"], 0)
        backward = 2 * of["frozen"] + flat + np.where(around, ends, 0)
        same = {
            "masters": np.where(divided, frozen / shards, frozen) + e * self._updated,
            "optimizer": np.where(
                rows.where("optimizer", "adafactor"), e * layers * of["factored"],
                e / MASTER_BYTES * self._state() * self._updated,
            ),
            "gradients": e * np.where(rows.cost("summed_bytes") > MASTER_BYTES, 2, 1) * self._updated,
            "unsharded": np.where(stays | (divided & ~by_unit), frozen, zero), "activations": activations,
        }  # fmt: skip
        workspaces = (
            np.where(gathers, at_ends + last, 0) + of["loss"],
            np.where(gathers, backward, 0) + recomputed + of["workspace"],
        )
        return highest([Memory(**same, workspace=workspace) for workspace in workspaces])

    def _kept(self) -> dict[str, Floats]:
        """Bytes by purpose, of one microbatch of a rank that has layers and both ends; of a layer, those of a dense one
        and, after them, those of a mixture.
        """
        model = self._model

        def kept(megatron: int, casts: int, *key: int) -> tuple[float, ...]:
            share = self._share(*key)
            if isinstance(model, CountedModel):
                found = counted_memory(model, self._counts(model, bool(casts), *key), share, casts=bool(casts))
                layer = [getattr(found.layer, name) for name in _MEMORY]
                return (*layer, *layer, found.loss, 0.0, found.scattering, 0.0, *(getattr(found, n) for n in _COUNTED))
            how = {"gathers_again": bool(megatron), "casts": bool(casts)}
            dense = layer_memory(model, share, dense=True, **how)
            mixed = layer_memory(model, share, dense=False, **how) if self._routed else dense
            layers = [getattr(kind, name) for kind in (dense, mixed) for name in _MEMORY]
            loss = loss_bytes(model, share, splits_loss=share.tp > 1 and not megatron)
            logits = share.element * share.tokens * model.vocab / share.tp
            scattering = MASTER_BYTES * share.tokens * model.dim
            return (*layers, loss, logits, scattering, hidden_bytes(model, share, casts=bool(casts)))

        ends = ("loss", "logits", "scattering", "hidden", *_COUNTED)
        names = (*_MEMORY, *(f"mixed {name}" for name in _MEMORY), *ends)
        return dict(zip(names, by_distinct(self._parts(), kept)))

    def _held(self, rank: Integers, kept: dict[str, Floats]) -> Held:
        """What the pipeline's ``rank`` holds."""
        rows, stages, ranks = self._rows, self._stages, self._rows["pp"]
        first, last = rank == 0, rank == ranks - 1
        staged = (ranks > 1) & ~self._megatron
        layers = np.where(first, stages.first, np.where(last, stages.last, stages.middle))
        layers = np.where(self._alone, self._model.n_layers, layers).astype(np.float64)
        embedding, head = np.where(first, self._embedding, 0.0), np.where(last, self._head, 0.0)
        routed = np.where(first, self._routed_first, self._routed_later)
        held = self._held_elements(layers, routed, embedding + head)
        parameters = held.all
        kept = {n: kept[n] * (1 - routed) + kept[f"mixed {n}"] * routed if n in _MEMORY else kept[n] for n in kept}
        part, some = self._checkpointed()
        none, full = kept["none"], kept["full"]
        layer = (1 - part - some) * none + part * full + some * kept["selective"]
        local = self._model.experts.count / rows["ep"] if self._model.experts else 1
        shapes = np.where(self._megatron, self._unit.rest + self._unit.experts / local, self._unit.all)
        recasts = (part + some) * (parameters - embedding - head)
        # Autocast keeps a cast only of what is trained.
        recasts = recasts * (1 - self._frozen_layers / np.maximum(1, layers))
        flying, microbatches, parts = in_flight(rows, rank), rows["microbatches"], rows["interleave"]
        # Messages that are still there when the rank has computed its last forward. 1F1B waits for each before it goes
        # on, so that outputs stay until their backward; others' outputs are their first layers' input. Torch's
        # schedules of several stages a rank wait at a step's end.
        onward, back = microbatches * (parts - last), np.maximum(0, microbatches - flying) * (parts - first)
        sent = np.where(rows.where("schedule", "1f1b"), np.where(first, flying, 0), onward + back)
        outputs = sent * kept["hidden"] + np.where(last, kept["logits"], 0)
        model, feed_forward, logits = self._model, self._feed_forward, np.where(last, kept["logits"], 0)
        if isinstance(model, CountedModel):
            uncast = np.full(len(rows), float(model.params - model.casts))
            own = {name: kept[name] for name in _COUNTED} | {"prefetched": self._unit.all}
            head_gradient = np.maximum(embedding, head)
        else:
            head_gradient = np.where(self._frozen_head, model.dim, np.maximum(embedding, head))
            uncast = self._frozen_layers * self._dense + (0 if model.tied else embedding)
            own = {
                "down": feed_forward / (3 if model.gated else 2), "feed_forward": feed_forward,
                "outputs": np.where(staged, outputs, 0),
                "cast_loss": logits * (1 + 2 * MASTER_BYTES / self._element),
                "prefetched": np.zeros_like(embedding), "of_head": logits + self._element * head_gradient,
            }  # fmt: skip
        received = microbatches * (parts * 2.0 - first - last)
        return Held(
            parameters=parameters, experts=held.experts, unit=self._unit.all, shapes=shapes,
            embedding=embedding, head=head,
            looked_up=np.where(first, self._looked_up, 0.0),
            active=layers - self._frozen_layers, trained=parameters - self._frozen,
            trained_embedding=np.where(first, self._trained_embedding, 0.0),
            trained_head=np.where(last, self._trained_head, 0.0), head_gradient=head_gradient,
            state=self._state(), casts=parameters - recasts - uncast, recasts=recasts,
            kept=layer,
            first=np.where(part > 0, full, layer),
            last=np.where(part > 0, np.where(part < 1, none, full), layer),
            recomputed=np.where(part > 0, none, np.where(some > 0, none - kept["selective"], 0)),
            **{name: kept[name] for name in _MEMORY if name not in ("none", "selective", "full")},
            loss=np.where(last, kept["loss"], 0), logits=logits,
            scattering=np.where(first, kept["scattering"], 0), **own,
            messages=np.where(staged, received * kept["hidden"], 0), layers=layers, in_flight=flying,
            in_flight_later=np.where(first, held_by_first_backward(rows), flying - 1 / parts),
            delays=delayed_weights(rows, rank),
        )  # fmt: skip


def _block_matrices(model: ModelSpec) -> list[tuple[int, int]]:
    """The matrices of an average layer that Muon steps, those of experts one by one."""
    linears = [*attention_linears(model), *feed_forward_linears(model, dense=model.experts is None)]
    return [(one.k, one.n) for one in linears for _ in range(one.count)]


def _newton_schulz_flops(model: ModelSpec) -> float:
    """FLOPs of Muon's step over all layers."""
    sides = [(min(sides), max(sides)) for sides in _block_matrices(model)]
    return NEWTON_SCHULZ * model.n_layers * sum(4.0 * m * m * n + 2.0 * m**3 for m, n in sides)


def _factored_elements(model: ModelSpec) -> float:
    """The averages of Adafactor, one for each row and each column of a matrix, those of experts one by one."""
    block = sum(m + n for m, n in _block_matrices(model))
    return model.n_layers * block + (1 if model.tied else 2) * (model.vocab + model.dim)


def checkpointed_layers(policy: Policy, n_layers: int) -> int:
    """How many of ``n_layers`` layers a policy checkpoints."""
    return len(checkpointing_of(policy, n_layers).layers)
