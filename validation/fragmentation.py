"""How much more memory a GPU must have than a run's tensors take: what torch's allocator cannot use of it.

    python -m validation.fragmentation FOLDER [--only PATTERN]
    python -m validation.fragmentation --table

Each cell is dry-run once at full depth, without a memory limit. What its ranks allocated is then allocated again on
smaller and smaller GPUs; the smallest on which no allocation fails is the result, as bytes that the allocator may
reserve there. Rows are added to ``fragmentation.json``, and those of cells that it has are replaced.

Cells are chosen by kind, before any was run: each strategy, policy of checkpointing and axis, with a model whose
peak is within a GPU's memory or close to it.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import msgspec

from refshard.dryrun.overheads import overheads
from refshard.folders import replace_file
from refshard.measure.dry.rank import (
    RECORDING_FILE,
    DryCase,
    forked,
    prepare,
    rank_folder,
    ranks_of,
    take_place,
)
from refshard.measure.worker import end_with_parent
from refshard.plan.estimate import estimate
from refshard.plan.space import Candidates
from refshard.quantities import MIB
from refshard.specs.case import Case, Protocol
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Job
from refshard.specs.model import load_model

TABLE = Path(__file__).with_name("fragmentation.json")
CLUSTER = "dgx-h100x8"
STEP = 8 * MIB
"""To how many bytes the smallest GPU is found."""
_8B, _1B = "llama3-8b", "llama3.2-1b"
_ENGINE = ("refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: bytes at the peak of allocated memory; the least that the allocator must be able to reserve, with
    segments of fixed size and with expandable ones; and what it reserves without a limit. Of the rank that needs most.
    """

    kind: str
    allocated: int
    least: int
    least_expandable: int
    reserved: int


def load_table() -> dict[str, Needed]:
    """What was measured, by the name of its cell."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, Needed])


def planned_bytes(job: Job) -> float:
    """The peak in closed form."""
    cluster = load_cluster(job.cluster).of_world_size(job.gpus)
    found = estimate(load_model(job.model), cluster, job.seq_len, Candidates.of([job]))
    return float(found.memory.peak[0])


def beyond_plan() -> dict[str, list[tuple[float, float]]]:
    """By kind, how much more each cell needs than its closed form: with expandable segments, and with fixed ones."""
    found = defaultdict(list)
    known = cells()
    for name, one in load_table().items():
        planned = planned_bytes(known[name].job)
        found[one.kind].append((one.least_expandable / planned - 1, one.least / planned - 1))
    return found


def table_lines() -> list[str]:
    """The rows of the table in docs/explanation/plan.md."""
    lines = []
    for kind, pairs in beyond_plan().items():
        expandable, fixed = zip(*pairs)
        parts = [f"{one:.1%}".replace("%", " %") for of in (expandable, fixed) for one in (median(of), max(of))]
        lines.append(f"| {kind} | {len(pairs)} | {' | '.join(parts)} |")
    return lines


@dataclass(frozen=True, slots=True)
class Cell:
    """A configuration, and the script that trains it where refshard's own trainer does not: its command line."""

    job: Job
    script: tuple[str, ...] = ()


def cells() -> dict[str, Cell]:
    """The cells by name; a name begins with its kind."""
    found: dict[str, Cell] = {}

    def add(kind: str, strategy: str, model: str, gpus: int, batch: int, **more: Any) -> None:
        parts = {"precision": "bf16", "seq_len": 4096, **more}
        data = gpus // (more.get("tp", 1) * more.get("cp", 1) * more.get("pp", 1))
        microbatches = parts.setdefault("microbatches", 1)
        name = f"{kind}: {strategy} {model} {gpus} x {batch} {' '.join(f'{k}={v}' for k, v in more.items())}"
        job = Job(
            strategy=strategy,
            model=model,
            gpus=gpus,
            cluster=CLUSTER,
            global_batch=data * batch * microbatches,
            **parts,
        )
        script = ("docs/examples/train_moe.py", f"--batch={batch}", f"--seq-len={job.seq_len}") if job.ep > 1 else ()
        found[name.strip()] = Cell(job, script)

    for policy, batch in (("none", 1), ("selective", 2), ("full", 6), ("first-20", 2)):
        for strategy in ("fsdp1", "fsdp2", "fsdp2-tuned", *_ENGINE):
            add("data parallel", strategy, _8B, 16, batch, checkpointing=policy)
    for policy, batch in (("none", 4), ("full", 16)):
        for strategy in ("ddp", "refshard-replicate", "single"):
            add("data parallel", strategy, _1B, 1 if strategy == "single" else 8, batch, checkpointing=policy)
    add("data parallel", "fsdp2", _8B, 16, 1, microbatches=4)
    add("data parallel", "fsdp2", _8B, 16, 2, checkpointing="full", seq_len=16384)
    add("data parallel", "fsdp2", _8B, 64, 2, dp_replicate=8)
    for policy, batch in (("none", 2), ("full", 8)):
        add("model parallel", "fsdp2", _8B, 16, batch, checkpointing=policy, tp=4, sequence_parallel=True)
        add("model parallel", "fsdp2", _8B, 16, batch, checkpointing=policy, cp=2)
        add("model parallel", "fsdp2", _8B, 16, batch // 2, checkpointing=policy, pp=2, microbatches=4)
        add(
            "model parallel", "fsdp2", _8B, 16, batch // 2, checkpointing=policy, pp=2, interleave=2, microbatches=4,
            schedule="interleaved",
        )  # fmt: skip
    for tuning in ("lora", "qlora"):
        for policy, batch in (("none", 2), ("full", 12)):
            add("adapters", "single", _8B, 1, batch, checkpointing=policy, tuning=tuning)
            add("adapters", "fsdp2", _8B, 8, batch, checkpointing=policy, tuning=tuning)
    for gpus, batch in ((8, 1), (16, 2), (64, 4), (64, 8)):
        add("experts", "fsdp2", "qwen3-30b-a3b", gpus, batch, checkpointing="full", ep=8)
    return found


def measure(name: str, cell: Cell, ext: ModuleType, folder: Path) -> Needed:
    """Run the cell, and find the smallest GPU; needs a process that has the device without a limit."""
    job = cell.job
    recordings = _of_script(cell) if cell.script else _of_case(job, ext, folder)
    cluster = load_cluster(job.cluster).of_world_size(job.gpus)
    outside = max(sum(one.bytes for one in overheads(cluster.accelerator, recording)) for recording in recordings)
    peak = _peak(recordings, cluster, ext)
    least = {
        expandable: _least(recordings, cluster, ext, expandable, peak.allocated + outside, peak.reserved + outside)
        for expandable in (False, True)
    }
    return Needed(
        kind=name.partition(":")[0], allocated=peak.allocated, reserved=peak.reserved, least=least[False] - outside,
        least_expandable=least[True] - outside,
    )  # fmt: skip


def _of_script(cell: Cell) -> list[Any]:
    from refshard.dryrun.request import request_on
    from refshard.dryrun.run import dry_run

    request = request_on(cell.job.cluster, cell.job.gpus, command=cell.script, limited=False)
    return [dry_run(request, also_at_worst=False, quiet=True).recording]


def _of_case(job: Job, ext: ModuleType, folder: Path) -> list[Any]:
    """What its ranks recorded, each in a child of this process."""
    from refshard.dryrun.recording import load

    asked = DryCase(case=Case(job=job, protocol=Protocol(fidelity="dryrun")), limited=False, traced=False)
    parent = os.getpid()

    def child(rank: int) -> None:
        try:
            if end_with_parent(parent, signal.SIGKILL):
                _record(asked, rank, ext, folder)
        finally:
            os._exit(1)

    for _ in forked(list(ranks_of(asked.case)), child):
        """Its recording is in its folder."""
    return [load(rank_folder(folder, rank) / RECORDING_FILE) for rank in ranks_of(asked.case)]


def _record(asked: DryCase, rank: int, ext: ModuleType, folder: Path) -> None:
    from refshard.dryrun.recording import collect, save
    from refshard.measure.dry.steps import run_steps

    cluster = load_cluster(asked.case.job.cluster).of_world_size(asked.case.job.gpus)
    take_place(rank, asked.case.job.gpus, cluster.ranks_per_node)
    (own := rank_folder(folder, rank)).mkdir(parents=True, exist_ok=True)
    result = run_steps(msgspec.structs.replace(asked, rank=rank), cluster, ext, own)
    if result.state != "ok":
        print(f"{result.state}: {result.error}", flush=True)
        os._exit(1)
    save(collect(ext, rank, asked.case.job.gpus), own / RECORDING_FILE)
    os._exit(0)


def _settled(recordings: Any, cluster: Any, ext: ModuleType, total: int, expandable: bool) -> list[Any]:
    """What each rank's allocator does with ``total`` bytes."""
    from refshard.dryrun.held_back import holds_back, settle, with_segments_of
    from refshard.dryrun.request import UNLIMITED_BYTES

    if any(map(holds_back, recordings)):
        found = settle(
            recordings, cluster, ext, 0, as_run_bytes=UNLIMITED_BYTES, total_bytes=total, expandable=expandable
        )  # fmt: skip
        return [one.allocator for one in found]
    return [
        with_segments_of(
            one, ext, 0, as_run_bytes=UNLIMITED_BYTES, total_bytes=total, expandable=expandable
        ) for one in recordings
    ]  # fmt: skip


def _peak(recordings: Any, cluster: Any, ext: ModuleType) -> Any:
    return max(
        (one.peak for one in _settled(recordings, cluster, ext, 0, expandable=False)), key=lambda pool: pool.allocated
    )


def _least(recordings: Any, cluster: Any, ext: ModuleType, expandable: bool, low: int, high: int) -> int:
    """The least total between one that may fail and one that does not."""
    high += STEP
    while high - low > STEP:
        middle = (low + high) // 2
        if any(one.refused for one in _settled(recordings, cluster, ext, middle, expandable)):
            low = middle
        else:
            high = middle
    return high


def main() -> None:
    """Measure the cells, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table_lines()))
        return
    table = load_table() if TABLE.exists() else {}
    chosen = {name: job for name, job in cells().items() if options.only in name}
    any_case = Case(job=next(iter(cells().values())).job, protocol=Protocol(fidelity="dryrun"))
    ext = prepare([DryCase(case=any_case, limited=False)] * 2)
    for place, (name, cell) in enumerate(chosen.items()):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            try:
                table[name] = measure(name, cell, ext, Path(folder))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
        print(f"{place + 1}/{len(chosen)} {name}: {table[name]}", flush=True)
        rows = (f"{msgspec.json.encode(k).decode()}: {msgspec.json.encode(v).decode()}" for k, v in table.items())
        replace_file(TABLE, ["{", ",\n".join(rows), "}"])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
