"""Clusters made by hand, and a clock that a test sets."""

import json
import threading
from pathlib import Path
from typing import Any

import msgspec

from refshard.emulate.delay import Clock
from refshard.specs.cluster import ClusterSpec, LinkSpec
from refshard.specs.hardware import HardwareSpec, Rate

RATE = Rate(peak=1e15, efficiency=0.5)
GPU = HardwareSpec(
    device="cuda", memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, matmul={"bf16": RATE}, attention={"bf16": RATE},
    kernel_s=2e-6, host_s=5e-6, multiprocessors=100,
    sources=dict.fromkeys(
        ("memory_bytes", "memory_bytes_per_s", "matmul", "attention", "kernel_s", "host_s", "multiprocessors"), "a test"
    ),
)  # fmt: skip


def make_cluster(library: str = "nccl", **changes: Any) -> ClusterSpec:
    """Nodes of 4 ranks; a gigabyte per second between ranks of a node, half of one between nodes, no latency."""
    fields: dict[str, Any] = {
        "hardware": GPU,
        "library": library,
        "ranks_per_node": 4,
        "within": LinkSpec(bytes_per_s=1e9, latency_s=0.0),
        "between": LinkSpec(bytes_per_s=0.5e9, latency_s=0.0),
        **changes,
    }
    sourced = ("ranks_per_node", "within", "between", "launch_s", "compute_beside_communication")
    return ClusterSpec(**fields, sources=dict.fromkeys(sourced, "a test"))


FAST: dict[str, Any] = dict.fromkeys(("within", "between"), LinkSpec(bytes_per_s=1e12, latency_s=0.0))
"""Links that take no time to speak of."""


class FakeClock(Clock):
    """Time that passes by being slept through and, by ``tick`` ns, by being asked for; ``slept`` are the ends."""

    def __init__(self, tick: int = 0) -> None:
        self.now, self._tick = 0, tick
        self.slept: list[int] = []
        self._lock = threading.Lock()

    def now_ns(self) -> int:
        with self._lock:
            self.now += self._tick
            return self.now

    def sleep_until(self, moment_ns: int, waking: threading.Event) -> None:
        with self._lock:
            self.slept.append(moment_ns)
            self.now = max(self.now, moment_ns)


def write_cluster(path: Path, cluster: ClusterSpec) -> Path:
    """The profile of ``cluster`` as a user would write it, in TOML."""
    lines, tables = list[str](), list[str]()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            tables.append(f"[{name}]")
            tables.extend(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None)
        elif value is not None and value != []:
            lines.append(f"{name} = {_toml(value)}")

    for name, value in msgspec.to_builtins(cluster).items():
        add(name, value)
    path.write_text("\n".join([*lines, *tables]))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    return json.dumps(value)
