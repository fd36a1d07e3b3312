"""Estimate how long a suite will take: from earlier launches of the same cases, else from their FLOPs."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from refshard import resources
from refshard.errors import SpecError, StoreError
from refshard.flops import flops_per_token
from refshard.measure.store import RECORDS, read_run
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.specs.suite import SuiteSpec

_START_S = 6.0
"""To start ranks and import torch on a quiet core."""
_DRY_RUN_S = 12.0
"""The mean of the launches in profiles/recorded/dryrun."""
_PART_OF_GEMM = 0.5
"""The share of this machine's rate in matrix products that training reaches; 0.4 to 0.6 in recorded runs on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How long launches will take, s, without the ``unknown`` ones (on GPUs that are not here)."""

    seconds: float
    launches: int
    seen_before: int
    unknown: int


def expected(suite: SuiteSpec, earlier: Mapping[str, float], *, gpus: bool = False) -> Expected:
    """How long the suite will take here, given what launches ``earlier`` took by their case's hash.

    Raises:
        SpecError: the suite's cases are wrong.
    """
    launches = [case for round_ in range(suite.most_rounds) for case in suite.cases(round_)]
    seconds = [earlier.get(case.hash) or _estimated_s(case, gpus=gpus) for case in launches]
    return Expected(
        seconds=sum(one for one in seconds if one is not None),
        launches=len(launches),
        seen_before=sum(case.hash in earlier for case in launches),
        unknown=sum(one is None for one in seconds),
    )


def earlier_launches(folders: Iterable[Path]) -> dict[str, float]:
    """Seconds of a launch, by the hash of its case: the median over all runs in these folders."""
    found: dict[str, list[float]] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"*/{RECORDS}")):
            if path.parent.is_symlink():
                continue
            try:
                launches = read_run(path.parent).launches
            except StoreError:  # damaged, or another version's: the estimate is only coarser
                continue
            for launch in launches:
                if launch.state == "ok":
                    found.setdefault(launch.spec_hash, []).append(launch.duration_s)
    return {spec_hash: median(seconds) for spec_hash, seconds in found.items()}


def recorded_folders() -> list[Path]:
    """The folders of runs that ship with refshard."""
    return sorted(path for path in (resources.root() / "profiles" / "recorded").glob("*") if path.is_dir())


def _estimated_s(case: Case, *, gpus: bool) -> float | None:
    """None for a case on GPUs: their rate is unknown here."""
    job = case.job
    if case.protocol.fidelity == "dryrun":
        return _DRY_RUN_S
    if case.protocol.device == "cuda" or (gpus and case.protocol.device == "auto"):
        return None
    try:
        model = load_model(job.model)
    except SpecError:
        return None
    steps = case.protocol.warmup_steps + case.protocol.measured_steps + case.protocol.traced_steps
    tokens = job.global_batch * job.seq_len * case.processes // job.gpus
    flops = flops_per_token(model, job.seq_len, workload=job.workload) * tokens * steps
    return _START_S + flops / (_PART_OF_GEMM * _gemm_flops_per_s())


@cache
def _gemm_flops_per_s() -> float:
    """The rate of all cores together in fp32 matrix products: the fastest of a few, since other work may disturb."""
    n = 1024
    a = np.ones((n, n), np.float32)
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)
