"""Jobs and estimates made for tests, and clusters whose numbers are round."""

from typing import Any

from refshard.plan.cost_models import COST_MODELS
from refshard.plan.estimate import Estimates, estimate
from refshard.plan.space import Candidates
from refshard.specs.cluster import ClusterSpec, LinkSpec, load_cluster
from refshard.specs.hardware import HardwareSpec, Rate
from refshard.specs.job import REFERENCE_STRATEGY, Implementation, Job
from refshard.specs.model import load_model

SOURCE = "made for a test"
SHARED = sorted(COST_MODELS.keys() - {REFERENCE_STRATEGY})
"""Strategies of several ranks."""


def job(**fields: Any) -> Job:
    """A job of FSDP2 and Llama 3 8B; the sizes of its mesh and its microbatch make its GPUs and its global batch.

    Fields of the implementation are among the others.
    """
    given = {"strategy": "fsdp2", "model": "llama3-8b", "seq_len": 8192, "precision": "bf16", **fields}
    own = {name: given.pop(name) for name in Implementation.__struct_fields__ if name in given}
    data = given.pop("dp_shard", 1) * given.get("dp_replicate", 1)
    given["gpus"] = data * given.get("cp", 1) * given.get("tp", 1) * given.get("pp", 1)
    given["global_batch"] = data * given.pop("microbatch", 1) * given.get("microbatches", 1)
    return Job(**given, implementation=Implementation(**own))


def columns(*rows: Job) -> Candidates:
    """The jobs as columns."""
    return Candidates.of(rows)


def estimated(
    *rows: Job, model: str = "llama3-8b", cluster: str | ClusterSpec = "dgx-h100x16", seq_len: int = 8192
) -> Estimates:
    """The estimates of jobs of a preset, on a profile's cluster."""
    on = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return estimate(load_model(model), on, seq_len, columns(*rows))


def hardware(**changes: Any) -> HardwareSpec:
    """A device of 1 PFLOP/s and 1 TB/s that launches for nothing."""
    rate = Rate(peak=1e15, efficiency=1.0)
    fields: dict[str, Any] = {
        "device": "cuda", "memory_bytes": 80 * 2**30, "memory_bytes_per_s": 1e12, "kernel_s": 0.0, "host_s": 0.0,
        "matmul": {"bf16": rate, "fp32": rate}, "attention": {"bf16": rate, "fp32": rate}, "multiprocessors": 100,
    }  # fmt: skip
    fields |= changes
    return HardwareSpec(**fields, sources=dict.fromkeys([f for f in fields if f != "device"], SOURCE))


def cluster(**changes: Any) -> ClusterSpec:
    """Nodes of 8 ranks, 100 GB/s within and 50 GB/s between them, without latency."""
    fields: dict[str, Any] = {
        "hardware": hardware(), "library": "nccl", "ranks_per_node": 8, "nodes": 1,
        "host_memory_bytes": 2**41, "host_memory_bytes_per_s": 1e11,
        "within": LinkSpec(bytes_per_s=100e9, latency_s=0.0), "between": LinkSpec(bytes_per_s=50e9, latency_s=0.0),
    }  # fmt: skip
    fields |= changes
    named = [f for f in fields if f not in ("hardware", "library", "nodes", "algorithms", "measured")]
    return ClusterSpec(**fields, sources=dict.fromkeys(named, SOURCE))
