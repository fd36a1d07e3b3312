"""Prices each event of a recording on a cluster, with the formulas of ``costs.py`` and the cluster's profile.

Matrix products, convolutions and attention are priced by FLOPs and bytes, fused optimizers by bytes. Everything else
takes its bytes at the memory's rate times a constant of its kernel (:data:`TIMES`): some kernels read their input
twice, and pointwise ones on non-contiguous tensors compute an address for each element. The host's time follows from
counts of what it did (:func:`host_seconds`), scaled by the profile's ``host_s``, which ``refshard calibrate`` measures
per kernel of a small decoder layer. These constants were fitted to one H200 under torch 2.11 (``python -m
tests.gpu.quick.fit``; ``docs/explanation/validation.md`` has the errors).

fp16 counts as bf16, fp64 as fp32 (data sheets give the same peak for both on the accelerators that have profiles). fp8
products run at the profile's rate for fp8; without one, and in int8, at twice bf16's rate. TF32 is not assumed. Copies
to and from the host run at the rate of the profile's host link.

Collectives are priced by ``costs.collective_cost``. One that it lacks is priced like one that moves the same bytes the
same way: a reduce like a broadcast (the same ring in the other direction), a gather and a scatter like an all-gather
(the root's link carries as much), a barrier like an all-reduce of its few bytes. A send and a receive take one hop and
the message's bytes: over the link within the node, or over one rank's share of the link between nodes.
"""

from collections import Counter
from dataclasses import dataclass
from math import isnan, nan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refshard.costs import (
    CollectiveCost,
    GroupShape,
    attention_seconds,
    collective_cost,
    group_shape,
    move_seconds,
    product_seconds,
    strided_seconds,
)
from refshard.dryrun.recording import GRAPH_LAUNCH, GROUP, HOST_COUNTS, Flag, Kind, Recording
from refshard.dryrun.work import TRITON, Scores, Work, element_bytes, parse, work_of
from refshard.errors import SpecError, nearest
from refshard.specs.cluster import ClusterSpec, CollectiveOp
from refshard.specs.hardware import Dtype, HardwareSpec

TIMES = {
    "_log_softmax": 1.92, "_log_softmax_backward_data": 1.36, "_fused_rms_norm": 1.55, "_fused_rms_norm_backward": 2.28,
    "_chunk_cat": 2.08, "_foreach_copy_": 1.95, "sum": 2.1, "embedding_dense_backward": 2.1, "silu": 1.16,
    "silu_backward": 1.05, "add": 0.89, "add_": 0.89, "mul": 0.91, "mul_": 0.91, "index": 1.5, "index_add": 13.0,
    "_index_put_impl_": 5.2,
}  # fmt: skip
"""By operator, how many times as long as a copy of as many bytes; 1 where none is given."""
WIDENED, NARROWED = 2.0, 0.94
"""The same for copies to a wider and to a narrower dtype."""


def operator_seconds(
    hardware: HardwareSpec, operator: str, signature: str, flags: int, reads: int, writes: int
) -> float:
    """Seconds of a launch of ``operator`` that reads ``reads`` and writes ``writes`` bytes.

    Backward of a loss only writes its gradients, even if its operator gets more tensors.
    """
    seconds = move_seconds(hardware, move_bytes(operator.rpartition("::")[2], signature, reads, writes))
    if flags & Flag.STRIDED:
        elements = max((tensor.numel for tensor in parse(signature).inputs), default=0)
        seconds = max(seconds, strided_seconds(hardware, elements))
    return seconds


def move_bytes(op: str, signature: str, reads: int, writes: int) -> float:
    """Bytes that a copy would move in the time of ``op``, named without its library."""
    nbytes = float(writes if op in ("nll_loss_backward", "nll_loss2d_backward") else reads + writes)
    return nbytes * (_copied(signature) if op == "copy_" else TIMES.get(op, 1.0))


def _copied(signature: str) -> float:
    """Time factor of a copy; its signature has the result first."""
    to, given = (element_bytes(tensor.dtype) for tensor in parse(signature).inputs)
    return WIDENED if to > given else NARROWED if to < given else 1.0


class HostCosts(NamedTuple):
    """Seconds of the host by kind of work. What a call costs includes the code around it.

    - ``launch_s``: a kernel or a collective.
    - ``event_s``: an event that is recorded or waited for, and the switch of streams that comes with it.
    - ``operator_s``: a call of torch's dispatcher, also for a view.
    - ``dispatched_s``: in addition, if a Python dispatch mode is on, such as selective checkpointing's.
    - ``node_s``: an autograd node in backward.
    - ``call_s``: a call of a Python function.
    - ``graph_s``: the launch of a CUDA graph, however many nodes it has.
    """

    launch_s: float
    event_s: float
    operator_s: float
    dispatched_s: float
    node_s: float
    call_s: float
    graph_s: float


PER_KERNEL_S = 4.2e-5
"""``host_s`` of the machine that :data:`COSTS` are of (``profiles/recorded/h200/calibration.toml``)."""
COSTS = HostCosts(
    launch_s=9.6e-6, event_s=1.47e-5, operator_s=2.46e-6, dispatched_s=2.83e-6, node_s=5.87e-6, call_s=8.2e-7,
    graph_s=2.5e-6,
)  # fmt: skip
"""``graph_s`` is NVIDIA's figure for CUDA 12.6, "Constant Time Launch for Straight-Line CUDA Graphs" (2024)."""
GRAPH_NODE_S = 1e-9
"""What each node adds to the launch of its graph, by the same source. On the device a node takes what an eager kernel
takes (``kernel_s`` and all): that the next one starts sooner there is not counted.
"""


COMPILED_S, TRITON_S = 2.56e-5, 1.77e-5
"""Seconds of the host in addition, on the same machine: for a launch from the wrapper that inductor generates, which
allocates and checks in Python, and for a launch of a Triton kernel. They are the times of the wrapper's and of the
launches' own code in one trace (``8b-w8-sel-compile`` in ``profiles/recorded/h200/kernels.jsonl.gz``, of the fit half).
"""


CHUNK_CAT_BLOCK, CHUNK_CAT_ENTRY_S = 2048, 6.0e-9
"""FSDP2's copy of gradients before a reduce-scatter, ``_chunk_cat``, makes a table on the host: an entry for each 2,048
bytes of a rank's part. That takes 0.3 ms for a layer of Llama 3 8B on 8 ranks, 0.7 ms for one of a 1B on one. The
seconds of an entry are a least-squares fit to the operator's own times in the fit half of
``profiles/recorded/h200/kernels.jsonl.gz``. In the held-out half they are 5 to 15 % off where the table is large.
"""


def host_seconds(recording: Recording, host_s: float) -> npt.NDArray[np.float64]:
    """Seconds by event, if the host needs ``host_s`` for a kernel of a small decoder layer."""
    triton = [name.startswith(TRITON) for name in recording.name_table]
    seconds: npt.NDArray[np.float64] = host_work(recording) @ np.array(COSTS)
    seconds += COMPILED_S * (recording.flags & Flag.COMPILED != 0)
    seconds += TRITON_S * ((recording.kinds == Kind.LAUNCH) & np.array(triton, np.bool_)[recording.names])
    seconds += CHUNK_CAT_ENTRY_S * _chunk_cat_entries(recording)
    return np.where(recording.flags & Flag.OF_GRAPH, GRAPH_NODE_S, seconds * (host_s / PER_KERNEL_S))


def _chunk_cat_entries(recording: Recording) -> npt.NDArray[np.float64]:
    """Entries of the table that each event's ``_chunk_cat`` makes, 0 for all others; the last tensor is the result."""
    entries = np.zeros(len(recording.kinds))
    named = np.array([name.endswith("::_chunk_cat") for name in recording.name_table], np.bool_)
    for row in np.flatnonzero(named[recording.names] & (recording.kinds == Kind.LAUNCH)):
        signature = parse(recording.signature_table[recording.signatures[row]])
        if tensors := (*signature.inputs, *signature.results):
            entries[row] = tensors[-1].shape[-1] * element_bytes(tensors[-1].dtype) / CHUNK_CAT_BLOCK
    return entries


def host_work(recording: Recording) -> npt.NDArray[np.float64]:
    """How often the host did what each field of :class:`HostCosts` prices: shape (events, fields).

    A capture takes a kernel in by the same call that would launch it.
    """
    kinds, flags = recording.kinds, recording.flags
    called = (flags & Flag.HOST_ONLY == 0) | (flags & Flag.CAPTURED != 0)
    launches = np.isin(kinds, (Kind.LAUNCH, Kind.COLLECTIVE)) & called & (flags & Flag.OF_GRAPH == 0)
    events = np.isin(kinds, (Kind.RECORD, Kind.WAIT)) & (flags & Flag.OF_GRAPH == 0)
    graphs = graph_launches(recording)
    counts = (getattr(recording, name) for name in HOST_COUNTS)
    return np.column_stack((launches, events, *counts, graphs)).astype(np.float64)


def graph_launches(recording: Recording) -> npt.NDArray[np.bool_]:
    """Which events launch a CUDA graph (bool, by event); its nodes follow."""
    names = np.array([name == GRAPH_LAUNCH for name in recording.name_table], np.bool_)
    found: npt.NDArray[np.bool_] = (recording.kinds == Kind.LAUNCH) & names[recording.names]
    return found


NO_LINK, WITHIN, BETWEEN, SENDING, RECEIVING = -1, 0, 1, 2, 3
"""Codes of :attr:`Prices.links`: what a collective occupies. Messages go both ways at once, so they have two."""
GROUPED_PART = 0.76
"""Part of a plain product's rate that a grouped one reaches: the experts of Qwen3-30B-A3B on an H200."""
_AS: dict[str, CollectiveOp] = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "broadcast", "gather": "all_gather",
    "scatter": "all_gather", "barrier": "all_reduce",
}  # fmt: skip
_PEERS = {"send": SENDING, "recv": RECEIVING}
COMPUTED_AS: dict[str, tuple[Dtype, float]] = {
    "fp32": ("fp32", 1.0), "bf16": ("bf16", 1.0), "fp16": ("bf16", 1.0), "fp64": ("fp32", 1.0),
    "fp8e4m3": ("bf16", 2.0), "fp8e5m2": ("bf16", 2.0), "int8": ("bf16", 2.0), "complex64": ("fp32", 0.25),
}  # fmt: skip
"""By dtype of a product's operands: the profile's rate, and how many times that fast, unless the profile has a rate for
fp8. A complex product is four.
"""
_TOUCHED_PER_READ = {"_fused_adam": 7 / 4, "_fused_sgd": 5 / 3, "_fused_adagrad": 5 / 3}
"""Bytes that a fused optimizer reads and writes per byte that it reads: it writes all but the gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Operators of one name with an uncertain price, and why: ``count`` launches of ``seconds`` in all."""

    name: str
    reason: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """What each event of a recording takes, undisturbed; columns have one entry per event.

    - ``seconds`` (float64): of a launch on the device; of a collective as long as it occupies its link.
    - ``latencies`` (float64): seconds from when a collective leaves its link until its result is there.
    - ``links`` (int8): what a collective occupies, :data:`NO_LINK` for everything else and in a group of one rank.
    - ``flops`` (float64): floating-point operations of a launch.
    - ``host_seconds`` (float64): what the host needs to ask for the event.
    """

    seconds: npt.NDArray[np.float64]
    latencies: npt.NDArray[np.float64]
    links: npt.NDArray[np.int8]
    flops: npt.NDArray[np.float64]
    host_seconds: npt.NDArray[np.float64]
    doubts: tuple[Doubt, ...] = ()


def price(recording: Recording, cluster: ClusterSpec, measured: npt.NDArray[np.float64] | None = None) -> Prices:
    """Price all events of one rank; ``measured`` has the seconds of launches, NaN where they are to be modelled.

    Raises:
        SpecError: the profile lacks what an event needs, or the collective is not known.
    """
    pricing = _Pricing(recording, cluster)
    seconds, latencies, flops = (np.zeros(len(recording)) for _ in range(3))
    links = np.full(len(recording), NO_LINK, np.int8)
    for row in np.flatnonzero(recording.kinds == Kind.LAUNCH).tolist():
        known = nan if measured is None else float(measured[row])
        seconds[row], flops[row] = pricing.launch(row, known)
    for row in np.flatnonzero(recording.kinds == Kind.COLLECTIVE).tolist():
        links[row], seconds[row], latencies[row] = pricing.collective(row)
    return Prices(
        seconds=seconds,
        latencies=latencies,
        links=links,
        flops=flops,
        host_seconds=host_seconds(recording, cluster.accelerator.host_s),
        doubts=pricing.doubts(),
    )


class _Pricing:
    """Prices rows of one recording, each kind of launch once."""

    def __init__(self, recording: Recording, cluster: ClusterSpec) -> None:
        self._recording, self._cluster, self._hardware = recording, cluster, cluster.accelerator
        self._columns = list(
            zip(*(c.tolist() for c in (
                recording.names, recording.signatures, recording.flags, recording.reads, recording.writes,
                recording.sizes,
            )))
        )  # fmt: skip
        self._calls = list(zip(recording.names.tolist(), recording.subjects.tolist(), recording.sizes.tolist()))
        self._launches: dict[tuple[int, ...], tuple[float, float, str]] = {}
        self._collectives: dict[tuple[int, ...], tuple[int, float, float]] = {}
        self._doubted: Counter[tuple[int, ...]] = Counter()

    def launch(self, row: int, known: float) -> tuple[float, float]:
        """Seconds, unless they are ``known``, and FLOPs."""
        key = self._columns[row]
        if key not in self._launches:
            self._launches[key] = self._launch(*key)
        seconds, flops, doubt = self._launches[key]
        if not isnan(known):
            return known, flops
        if doubt:
            self._doubted[key] += 1
        return seconds, flops

    def doubts(self) -> tuple[Doubt, ...]:
        """Over all launches that were priced, by name and reason, the longest first."""
        counts: Counter[tuple[str, str]] = Counter()
        seconds: Counter[tuple[str, str]] = Counter()
        for key, count in self._doubted.items():
            each, _, reason = self._launches[key]
            about = self._recording.name_table[key[0]], reason
            counts[about] += count
            seconds[about] += count * each  # type: ignore[assignment]
        found = (Doubt(name=n, reason=r, count=counts[n, r], seconds=float(seconds[n, r])) for n, r in counts)
        return tuple(sorted(found, key=lambda doubt: -doubt.seconds))

    def _launch(
        self, name: int, signature: int, flags: int, reads: int, writes: int, flops: int
    ) -> tuple[float, float, str]:
        if flags & Flag.HOST_ONLY:
            return 0.0, 0.0, ""
        if flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST):
            return self._host_copy(max(reads, writes)), 0.0, ""
        operator, text = self._recording.name_table[name], self._recording.signature_table[signature]
        work = work_of(operator, text, flags, flops)
        nbytes = float(reads + writes)
        match work.kind:
            case "product":
                seconds = self._product(operator, work, nbytes)
            case "attention":
                seconds = max(self._attention(operator, work), move_seconds(self._hardware, nbytes))
            case "optimizer":
                seconds = self._optimizer(operator, reads, nbytes)
            case "move":
                seconds = operator_seconds(self._hardware, operator, text, flags, reads, writes)
        return seconds, work.flops, work.doubt

    def _product(self, operator: str, work: Work, nbytes: float) -> float:
        rate, times = self._rate(operator, work.dtype)
        times *= GROUPED_PART if operator.endswith("::_grouped_mm") else 1.0
        if _is_fp8(work.dtype) and "fp8" in self._hardware.matmul:
            return product_seconds(self._hardware, "fp8", work.flops, nbytes)
        return product_seconds(self._hardware, rate, work.flops / times, nbytes)

    def _attention(self, operator: str, work: Work) -> float:
        """By the law of the causal half, which T tokens and H heads have H T^2 / 2 scores of.

        Without a mask there are twice as many, as if there were twice the heads.
        """
        scores = work.scores
        assert isinstance(scores, Scores)
        dtype, _ = self._rate(operator, work.dtype)
        heads = round(2 * scores.pairs / scores.length**2)
        return attention_seconds(
            self._hardware, dtype, heads=heads, seq_len=scores.length, head_dim=scores.head_dim,
            backward=scores.backward, kernel=scores.kernel,
        )  # fmt: skip

    def _optimizer(self, operator: str, reads: int, nbytes: float) -> float:
        base = next(name for name in _TOUCHED_PER_READ if name in operator)
        reached = self._hardware.optimizer_bytes_per_s or self._hardware.memory_bytes_per_s
        return self._hardware.kernel_s + min(nbytes, _TOUCHED_PER_READ[base] * reads) / reached

    def _host_copy(self, nbytes: int) -> float:
        if not self._hardware.host_link_bytes_per_s:
            raise SpecError(
                "hardware: host_link_bytes_per_s must be known where a step copies to or from the host, got 0; add "
                "the bandwidth of copies from pinned memory to the profile"
            )
        return self._hardware.kernel_s + nbytes / self._hardware.host_link_bytes_per_s

    def _rate(self, operator: str, dtype: str) -> tuple[Dtype, float]:
        """The profile's dtype, and how many times its rate."""
        rate, times = COMPUTED_AS.get(dtype) or (("bf16", 2.0) if _is_fp8(dtype) else ("fp32", 1.0))
        if rate not in self._hardware.attention:
            raise SpecError(
                f"hardware: the profile must have a rate for {operator} of {dtype}, got rates for "
                f"{', '.join(sorted(self._hardware.attention))}; add [matmul.{rate}] and [attention.{rate}]"
            )
        return rate, times

    def collective(self, row: int) -> tuple[int, float, float]:
        """The link's code, seconds on it, and the latency after that."""
        key = self._calls[row]
        if key not in self._collectives:
            self._collectives[key] = self._collective(*key)
        return self._collectives[key]

    def _collective(self, name: int, subject: int, nbytes: int) -> tuple[int, float, float]:
        op = self._recording.name_table[name]
        if op in _PEERS:
            return self._message(_PEERS[op], subject, nbytes)
        if op not in _AS:
            raise SpecError(f"collective: '{op}' has no price; {nearest(op, [*_AS, *_PEERS])}")
        shape = group_shape(self._cluster, self._recording.groups[subject & GROUP].ranks)
        self._check_joined(shape)
        cost: CollectiveCost = collective_cost(self._cluster, _AS[op], nbytes, shape)
        if cost.algorithm == "none":
            return NO_LINK, 0.0, 0.0
        return BETWEEN if cost.link == "between" else WITHIN, cost.transfer_s, cost.latency_s

    def _message(self, link: int, subject: int, nbytes: int) -> tuple[int, float, float]:
        rank, peer = self._recording.rank, peer_of(self._recording, subject)
        if peer == rank:
            return NO_LINK, 0.0, 0.0
        cluster = self._cluster
        if peer // cluster.ranks_per_node == rank // cluster.ranks_per_node:
            bytes_per_s, hop_s = cluster.within.bytes_per_s, cluster.within.latency_s
        else:
            self._check_joined(GroupShape(ranks=2, nodes=2))
            assert cluster.between is not None
            bytes_per_s, hop_s = cluster.between.bytes_per_s / cluster.ranks_per_node, cluster.between.latency_s
        return link, nbytes / bytes_per_s, cluster.launch_s + hop_s

    def _check_joined(self, shape: GroupShape) -> None:
        if shape.nodes > 1 and self._cluster.between is None:
            raise SpecError(
                f"cluster: the profile needs a [between] table, since a group spans {shape.nodes} nodes "
                f"({self._cluster.ranks_per_node} ranks each); add it"
            )


def peer_of(recording: Recording, subject: int) -> int:
    """The global rank at the other end of a ``send`` or ``recv``; the upper 32 bits are its rank in the group."""
    ranks = recording.groups[subject & GROUP].ranks
    return ranks[subject >> 32]


def is_message(recording: Recording) -> npt.NDArray[np.bool_]:
    """Which events are one end of a message between two ranks (bool, by event)."""
    names = [code for code, name in enumerate(recording.name_table) if name in _PEERS]
    found: npt.NDArray[np.bool_] = (recording.kinds == Kind.COLLECTIVE) & np.isin(recording.names, names)
    return found


def _is_fp8(dtype: str) -> bool:
    """Whether a dtype is a form of fp8; names of rarer forms are torch's own (Float8_e4m3fnuz)."""
    return dtype.startswith("fp8") or "loat8" in dtype
