"""Published runs as configurations, and what is predicted of them."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import msgspec

from refshard.errors import SpecError
from refshard.estimate.candidates import Candidates
from refshard.estimate.estimate import estimate
from refshard.quantities import GIB
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.configuration import Configuration
from refshard.specs.model import ModelSpec
from refshard.specs.published_parallel import ParallelRun, ParallelTable, load_parallel, model_of
from refshard.specs.reading import convert

Half = Literal["fit", "held out"]
_STRATEGIES = {
    "fsdp1": "fsdp1", "fsdp1, SHARD_GRAD_OP": "fsdp1-grad-op", "fsdp2": "fsdp2", "zero0": "ddp", "zero1": "megatron",
    "fsdp2, asynchronous tensor parallelism": "fsdp2", "yafsdp": "refshard-yafsdp",
    "fsdp2, ends in units": "fsdp2-tuned", "simplefsdp, by block": "simplefsdp-by-block",
}  # fmt: skip
_BY_RUN = ("seq_len", "strategy", "checkpointing", "precision", "interleave")
"""Assumptions that stand for what a run does not say; others hold for all."""
_POLICY = re.compile(r"none|selective|full|every-[1-9]\d*|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published run as a configuration of a model on a cluster; ``seconds`` is its step time."""

    table: str
    run: ParallelRun
    model: ModelSpec
    cluster: ClusterSpec
    cluster_name: str
    seq_len: int
    configuration: Configuration
    seconds: float
    half: Half = "held out"

    @property
    def setting(self) -> tuple[object, ...]:
        """What a run shares with those that differ only in their number of GPUs, their release or their file."""
        r = self.run
        return (
            self.table, r.hardware, r.model, r.layers, r.precision, self.seq_len, r.tensor, r.pipeline, r.interleave,
            r.context, None if r.fsdp == r.gpus else r.fsdp, r.microbatch, r.checkpointing, r.compiled, r.strategy,
        )  # fmt: skip


def published_of(name: str, table: ParallelTable, run: ParallelRun) -> Published | str:
    """The run as a configuration, or why it is none: what its source does not say."""
    assumed = table.assumed
    seq_len = run.seq_len or assumed.get("seq_len")
    if run.hardware not in table.clusters:
        return f"no cluster profile for {run.hardware}"
    if not isinstance(seq_len, int):
        return "the sequence length is not stated"
    policy = run.checkpointing or assumed.get("checkpointing")
    if not _POLICY.fullmatch(str(policy)):
        return f"checkpointing: {policy or 'not stated'}"
    precision = run.precision or assumed.get("precision")
    if precision not in ("bf16", "fp8"):
        return f"precision: {precision or 'not stated'}"
    strategy = _STRATEGIES.get(run.strategy) if run.strategy else assumed.get("strategy")
    if strategy is None:
        return f"no closed form of {run.strategy or 'a strategy that is not stated'}"
    try:
        model = model_of(table, run)
    except SpecError as error:
        return str(error)
    return _configured(name, table, run, model, seq_len, str(policy), str(precision), str(strategy))


def _configured(
    name: str, table: ParallelTable, run: ParallelRun, model: ModelSpec, seq_len: int, policy: str, precision: str,
    strategy: str,
) -> Published | str:  # fmt: skip
    data = run.gpus // run.model_parallel
    shard = data if strategy == "megatron" or run.fsdp is None else run.fsdp
    if strategy == "ddp":
        shard = 1
    if data % shard:
        return f"{shard} shards do not divide {data} data-parallel ranks"
    batch = _batch(run, data)
    if batch is None:
        return "the batch is not stated"
    microbatch, microbatches = batch
    seconds = _seconds(run, data * microbatch * microbatches * seq_len)
    if seconds is None:
        return "no speed in tokens or seconds"
    interleave = run.interleave or (1 if (run.pipeline or 1) == 1 else table.assumed.get("interleave"))
    if not isinstance(interleave, int):
        return "the pipeline's interleaving is not stated"
    fields = {key: value for key, value in table.assumed.items() if key not in _BY_RUN}
    fields |= {"compiled": run.compiled} if run.compiled is not None else {}
    fields |= {"overlap_tensor": True} if "asynchronous" in run.strategy else {}
    fields |= {
        "strategy": strategy, "shard": shard, "replicate": data // shard, "tensor": run.tensor or 1,
        "context": run.context or 1, "pipeline": run.pipeline or 1, "interleave": interleave,
        "schedule": "interleaved" if interleave > 1 else "1f1b", "microbatch": microbatch,
        "microbatches": microbatches, "checkpointing": policy, "precision": precision,
    }  # fmt: skip
    configuration = convert(fields, Configuration, where=f"published {name}")
    cluster_name = table.clusters[run.hardware]
    cluster = _filled(cluster_name, run.gpus)
    return Published(
        table=name, run=run, model=model, cluster=cluster, cluster_name=cluster_name, seq_len=seq_len,
        configuration=configuration, seconds=seconds,
    )  # fmt: skip


@cache
def _filled(name: str, gpus: int) -> ClusterSpec:
    """As many nodes as the run fills; of racks whose GPUs do not divide it, as many GPUs of each as do (64 of 72).

    It holds its accelerator: predictions ask for it thousands of times, and would read its profile as often.
    """
    cluster = load_cluster(name)
    used = min(gpus, cluster.ranks_per_node)
    while gpus % used:
        used -= 1
    return msgspec.structs.replace(cluster, ranks_per_node=used, nodes=gpus // used, hardware=cluster.accelerator)


def _batch(run: ParallelRun, data: int) -> tuple[int, int] | None:
    """Sequences of a microbatch, and microbatches; under torchtitan's pipelines the printed batch is of single ones."""
    if run.strategy.startswith("fsdp") and (run.pipeline or 1) > 1:
        return (1, run.microbatch * (run.microbatches or 1)) if run.microbatch else None
    if run.microbatch and run.microbatches:
        return run.microbatch, run.microbatches
    if run.microbatch and run.global_batch:
        count, rest = divmod(run.global_batch, data * run.microbatch)
        return (run.microbatch, count) if count and not rest else None
    return (run.microbatch, 1) if run.microbatch and run.tokens_per_s_gpu else None


def _seconds(run: ParallelRun, tokens: int) -> float | None:
    if run.seconds:
        return run.seconds
    if run.tokens_per_s:
        return tokens / run.tokens_per_s
    return tokens / run.tokens_per_s_gpu / run.gpus if run.tokens_per_s_gpu else None


def load_runs(
    tables: Mapping[str, ParallelTable] | None = None,
) -> tuple[list[Published], Counter[tuple[str, str]]]:
    """The runs of tables (by default of all that ship) that are configurations, and how many are none, by table and
    reason.

    Of each table that ships and each accelerator in it, every other setting is marked "fit", in the order of the file.
    No constant was fitted on other tables.

    Raises:
        SpecError: a table breaks its schema.
    """
    found: list[Published] = []
    left: Counter[tuple[str, str]] = Counter()
    shipped = load_parallel()
    for name, table in (shipped if tables is None else tables).items():
        of_table: list[Published] = []
        for run in table.runs:
            one = published_of(name, table, run)
            if isinstance(one, str):
                left[name, one] += 1
            else:
                of_table.append(one)
        found += _halved(of_table) if shipped.get(name) == table else of_table
    return found, left


def _halved(runs: Sequence[Published]) -> list[Published]:
    halves: dict[tuple[object, ...], Half] = {}
    counts: Counter[str] = Counter()
    for one in runs:
        if one.setting not in halves:
            halves[one.setting] = "fit" if counts[one.run.hardware] % 2 == 0 else "held out"
            counts[one.run.hardware] += 1
    return [replace(one, half=halves[one.setting]) for one in runs]


def half_of(run: Published) -> Half:
    """Whether constants may be fitted to the run."""
    return run.half


def predicted(runs: Sequence[Published]) -> list[tuple[float, float]]:
    """Predicted step time (seconds) and peak of allocated memory (GiB) of each run."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        groups[id(run.cluster), run.model, run.seq_len].append(place)
    found = [(0.0, 0.0)] * len(runs)
    for places in groups.values():
        first = runs[places[0]]
        rows = Candidates.of([runs[place].configuration for place in places])
        estimates = estimate(first.model, first.cluster, first.seq_len, rows)
        for place, seconds, peak in zip(places, estimates.step_s.tolist(), estimates.memory.peak.tolist()):
            found[place] = (seconds, peak / GIB)
    return found
