"""``python -m tests.gpu.quick.fit``: what dry runs assume of kernels and of the host, and what a GPU's records say.

Half of the cases are fitted, the others held out (``cases.half_of``). Kernels: by group of operators, their time in the
recorded traces, and that over the dry run's; 1.00 means that the constants of ``refshard/dryrun/price.py`` and of the
profile fit. Host: the costs there. Each starts from what ``host.json`` has of calls in a
loop, times one factor for all, since code that runs once is slower than a loop. Least squares over the logarithms of
the errors of forward, backward and optimizer in the cases with narrow layers, which only the host holds up, with a
term (log(cost / start) / WIDTH)^2 for each cost.
"""

import gzip
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from refshard.dryrun.price import CHUNK_CAT_BLOCK, COSTS, HostCosts, host_work, price
from refshard.dryrun.recording import Flag, Kind, Phase, Recording
from refshard.dryrun.request import Request
from refshard.dryrun.run import dry_run
from refshard.dryrun.steps import steps_of
from refshard.dryrun.work import work_of
from refshard.specs.cluster import load_cluster
from tests.gpu.quick.cases import SCRIPT, Case, half_of, read_cases

RECORDS = Path(__file__).parents[3] / "profiles" / "recorded" / "h200"
CLUSTER = "hgx-h200"
NOISE, WIDTH, SMALL_S = 0.2, 0.5, 4e-3
"""Noise of the host's times and uncertainty of a cost, as logarithms; parts shorter than this count less."""
PARTS = ((Phase.OTHER, Phase.FORWARD), (Phase.BACKWARD, Phase.RECOMPUTE), (Phase.OPTIMIZER,))
"""Phases of what ``train.py`` times: up to ``forward_s``, from there to ``backward_s``, from there to ``issued_s``."""


_NO_KERNEL = Flag.HOST_ONLY | Flag.DEVICE_TO_HOST | Flag.HOST_TO_DEVICE


def main() -> None:
    """Dry-run each case that was recorded, and print both tables."""
    with gzip.open(RECORDS / "kernels.jsonl.gz", "rt") as file:
        traces = {row["case"]: row for row in map(json.loads, file)}
    timed = _timed()
    kernels: dict[str, Counter[tuple[str, str]]] = {"fit": Counter(), "held out": Counter()}
    work: dict[str, list[npt.NDArray[np.float64]]] = {"fit": [], "held out": []}
    seconds: dict[str, list[float]] = {"fit": [], "held out": []}
    for case in read_cases():
        half, narrow = half_of(case), case.name.startswith("narrow")
        if case.name not in (timed if narrow else traces) or "compile" in case.name or "qlora" in case.name:
            continue
        print(f"{case.name}: {half}", file=sys.stderr, flush=True)
        recording = _record(case)
        if narrow:
            work[half] += _host_work(recording)
            seconds[half] += timed[case.name]
            continue
        measured, predicted = _measured(traces[case.name]), _predicted(recording, case)
        for group in measured.keys() & predicted.keys():
            kernels[half][group, "measured"] += measured[group]
            kernels[half][group, "predicted"] += predicted[group]
    print("| kernels | fit: measured, ms | / dry run | held out: measured, ms | / dry run |\n|---|---|---|---|---|")
    for group in sorted({group for half in kernels.values() for group, _ in half}):
        cells = [_cells(half[group, "measured"], half[group, "predicted"]) for half in kernels.values()]
        print(f"| {group} | {' | '.join(cells)} |")
    print(f"CHUNK_CAT_ENTRY_S = {_entry_seconds(traces):.3g}")
    costs = _fit_host(np.array(work["fit"]), np.array(seconds["fit"]))
    print(*(f"{name} = {cost:.3g}" for name, cost in zip(HostCosts._fields, costs)), sep="\n")
    for half in ("fit", "held out"):
        errors = _step_errors(np.array(work[half]) @ costs, np.array(seconds[half]))
        print(f"host, {half}: {len(errors)} cases, median error {median(errors):.1%}, worst {max(errors):.1%}")


def _entry_seconds(traces: dict[str, Any]) -> float:
    """Seconds by entry of ``_chunk_cat``'s table in the fit half, of which each case counts alike."""
    found = []
    for case in read_cases():
        trace = traces.get(case.name, {"host": [], "kernels": []})
        own = [one for one in trace["host"] if one["name"] == "aten::_chunk_cat"]
        copies = [one for one in trace["kernels"] if one["op"] == "aten::_chunk_cat" and "chunk_cat" in one["kernel"]]
        if half_of(case) != "fit" or not own:
            continue
        sizes = [json.loads(one["shapes"])[0][-1][-1] * (4 if "<float" in one["kernel"] else 2) for one in copies]
        entries = sum(one["n"] * size / CHUNK_CAT_BLOCK for one, size in zip(copies, sizes))
        found.append((entries / sum(one["n"] for one in copies), 1e-6 * own[0]["self_us"] / own[0]["n"]))
    entries_of, seconds = np.array(found).T
    return float(np.polyfit(entries_of, seconds, 1, w=1 / seconds)[0])


def _cells(measured: float, predicted: float) -> str:
    return f"{1e3 * measured:.1f} | {measured / predicted:.2f}" if predicted else "|"


def _record(case: Case) -> Recording:
    nodes = -(-case.world_size // 8)
    request = Request(
        command=(str(SCRIPT), "--out", os.devnull, *case.arguments, "--steps", "4"), steps=4,
        cluster=CLUSTER + (f"x{nodes}" if nodes > 1 else ""), world_size=case.world_size,
        local_ranks=min(8, case.world_size), limited=False, environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return dry_run(request).recording


def _timed() -> dict[str, list[float]]:
    """By case, the host's seconds for forward, backward and optimizer: medians over steps of all launches."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for file in sorted(RECORDS.glob("cases-*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            found[row["name"]] += [step for step in row.get("steps", [])[3:] if "forward_s" in step]
    ends = ("forward_s", "backward_s", "issued_s")
    return {
        name: np.median(np.diff([[0.0, *(step[end] for end in ends)] for step in steps]), axis=0).tolist()
        for name, steps in found.items() if steps
    }  # fmt: skip


def _last_step(recording: Recording) -> npt.NDArray[np.int64]:
    step = steps_of(recording, "step")[-1]
    return np.arange(step.first, step.end)


def _host_work(recording: Recording) -> Iterator[npt.NDArray[np.float64]]:
    rows = _last_step(recording)
    work, phases = host_work(recording)[rows], recording.phases[rows]
    for part in PARTS:
        yield work[np.isin(phases, part)].sum(axis=0)


def _in_a_loop() -> HostCosts:
    """From times of calls in a loop, each less what it has of others."""
    us = json.loads((RECORDS / "host.json").read_bytes())
    operator, call = us["view, no autograd"], us["module"] / 3  # a module's call is three Python functions
    backward = us["view, forward and backward"] - us["view, forward"]
    switch = us["stream entered and left"] / 2
    return HostCosts(
        launch_s=us["add, no autograd"] - operator, operator_s=operator, call_s=call,
        event_s=switch + (us["event recorded"] + us["event waited for by a stream"]) / 2,
        dispatched_s=us["add under a dispatch mode"] - us["add, no autograd"] - 2 * call,
        node_s=backward - 2 * operator, graph_s=COSTS.graph_s,
    )  # fmt: skip


def _fit_host(work: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    start, weights = np.log(_in_a_loop()), np.minimum(1, seconds / SMALL_S) / NOISE

    def residuals(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        predicted = work @ np.exp(start + logs[0] + logs[1:])
        return np.concatenate((np.log(predicted / seconds) * weights, logs[1:] / WIDTH))

    found = least_squares(residuals, np.zeros(1 + len(start))).x
    costs: npt.NDArray[np.float64] = np.exp(start + found[0] + found[1:])
    return costs


def _step_errors(predicted: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> list[float]:
    parts = len(PARTS)
    sums = predicted.reshape(-1, parts).sum(axis=1) / measured.reshape(-1, parts).sum(axis=1)
    found: list[float] = np.abs(sums - 1).tolist()
    return found


def _measured(trace: dict[str, Any]) -> Counter[str]:
    """Seconds of a step by group."""
    found: Counter[str] = Counter()
    for kernel in trace["kernels"]:
        if not any(part in kernel["kernel"] for part in ("Memcpy", "Memset")):
            found[_measured_group(kernel)] += 1e-6 * kernel["n"] * kernel["us"] / trace["steps"]
    return found


def _measured_group(kernel: dict[str, Any]) -> str:
    operator, name = (kernel["op"] or "").rpartition("::")[2], kernel["kernel"]
    if "attention" in operator:
        return "attention, " + next(kind for kind in ("cudnn", "efficient", "flash") if kind in operator)
    if "native::elementwise_kernel<" in name:
        return "strided"
    if operator == "copy_":
        return "copy_, widening" if "unrolled_elementwise_kernel<" in name else "copy_, narrowing"
    if operator in ("mm", "bmm", "addmm"):
        return "matrix products"
    return "fused optimizer" if operator.startswith("_fused_adam") else operator.removesuffix("_")


def _predicted(recording: Recording, case: Case) -> Counter[str]:
    prices = price(recording, load_cluster(CLUSTER + "x8").of_world_size(max(case.world_size, 8)))
    found: Counter[str] = Counter()
    for row in _last_step(recording).tolist():
        flags = int(recording.flags[row])
        if recording.kinds[row] == Kind.LAUNCH and not flags & _NO_KERNEL:
            name, text = (
                table[codes[row]]
                for table, codes in (
                    (recording.name_table, recording.names), (recording.signature_table, recording.signatures)
                )
            )  # fmt: skip
            found[_predicted_group(name, text, flags)] += float(prices.seconds[row])  # type: ignore[assignment]
    return found


def _predicted_group(name: str, text: str, flags: int) -> str:
    operator, work = name.rpartition("::")[2], work_of(name, text, flags)
    if work.scores is not None:
        return f"attention, {work.scores.kernel}"
    if flags & Flag.STRIDED:
        return "strided"
    if operator == "copy_":
        to, given = (tensor.split("[")[0] for tensor in text.split()[:2])
        return "plain copies" if to == given else "copy_, widening" if to == "fp32" else "copy_, narrowing"
    if operator in ("mm", "bmm", "addmm"):
        return "matrix products"
    return "fused optimizer" if work.kind == "optimizer" else operator.removesuffix("_")


if __name__ == "__main__":
    main()
