"""Configurations and estimates made for tests, and clusters whose numbers are round."""

from typing import Any

from refshard.plan.estimate import Estimates, estimate
from refshard.plan.space import Candidates
from refshard.specs.cluster import ClusterSpec, LinkSpec, load_cluster
from refshard.specs.configuration import Configuration
from refshard.specs.hardware import HardwareSpec, Rate
from refshard.specs.model import load_model

SOURCE = "made for a test"


def configuration(**fields: Any) -> Configuration:
    """A configuration of FSDP2."""
    return Configuration(**{"strategy": "fsdp2", **fields})


def columns(*rows: Configuration) -> Candidates:
    """The configurations as columns."""
    return Candidates.of(rows)


def estimated(
    *rows: Configuration, model: str = "llama3-8b", cluster: str | ClusterSpec = "dgx-h100x16", seq_len: int = 8192
) -> Estimates:
    """The estimates of configurations of a preset, on a profile's cluster."""
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
        "within": LinkSpec(bytes_per_s=100e9, latency_s=0.0), "between": LinkSpec(bytes_per_s=50e9, latency_s=0.0),
    }  # fmt: skip
    fields |= changes
    named = [f for f in fields if f not in ("hardware", "library", "nodes", "algorithms", "measured")]
    return ClusterSpec(**fields, sources=dict.fromkeys(named, SOURCE))
