"""Runs made by hand, with numbers whose medians, ratios and verdicts are known.

The steps of a launch are spread evenly over +-1 % of a centre; the centres of rounds are 1 % apart, around the step
time in :data:`CASES`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from refshard.measure.store import RunWriter
from refshard.quantities import GIB, MIB
from refshard.records import (
    METRICS,
    CollectiveCount,
    EndRecord,
    Environment,
    GpuMemory,
    LaunchRecord,
    Load,
    Proof,
    Run,
    RunRecord,
)
from refshard.specs.case import Case, Fidelity
from refshard.specs.suite import NetworkSpec, SuiteSpec

HOSTILE = "</script><script>alert(1)</script>"
STEPS = 20
TOKENS = 8 * 256


@dataclass(frozen=True, kw_only=True)
class Made:
    """The known numbers of one case; times in s."""

    strategy: str
    step_time: float
    peak_mib: float
    compute: float
    comm: float
    exposed: float
    idle: float
    parity: float
    world_size: int = 2
    identical: bool | None = None
    note: str = ""
    gathers: int = 0


CASES = (
    Made(strategy="single", world_size=1, step_time=0.0800, peak_mib=420, compute=0.079, comm=0, exposed=0,
         idle=0.003, parity=0.0),
    Made(strategy="ddp", step_time=0.0500, peak_mib=440, compute=0.040, comm=0.020, exposed=0.009, idle=0.002,
         parity=2.0e-7, identical=True),
    Made(strategy="fsdp2", step_time=0.0600, peak_mib=300, compute=0.042, comm=0.030, exposed=0.016,
         idle=0.004, parity=3.1e-7, identical=False, note="reduces in another order", gathers=13),
    Made(strategy="refshard-fsdp", step_time=0.0480, peak_mib=280, compute=0.040, comm=0.024, exposed=0.006,
         idle=0.003, parity=2.0e-7, identical=True, gathers=13),
    Made(strategy="refshard-yafsdp", step_time=0.0400, peak_mib=240, compute=0.038, comm=0.020, exposed=0.001,
         idle=0.002, parity=2.0e-7, identical=True, gathers=13),
)  # fmt: skip
"""Five cases that finish; ``refshard-yafsdp`` is fastest (0.0400 s) and needs the least memory (240 MiB)."""
FAILED = "fsdp2-tuned"
STRATEGIES = ("single", "ddp", "fsdp2", FAILED, "refshard-fsdp", "refshard-yafsdp")


def run(made: Sequence[Made] = CASES, *, rounds: int = 3, failed: bool = True, fidelity: Fidelity = "measured") -> Run:
    """The cases of ``made`` in each of ``rounds`` rounds, and :data:`FAILED`, which fails in the last."""
    records = [launch(case, number, rounds, fidelity) for number in range(rounds) for case in made]
    if failed:
        tuned = replace(made[-1], strategy=FAILED, step_time=0.0410)
        records += [launch(tuned, number, rounds, fidelity) for number in range(rounds - 1)]
        records.append(failure(rounds - 1))
    states: dict[str, int] = {}
    for record in records:
        states[record.state] = states.get(record.state, 0) + 1
    return Run(
        header=header(rounds, planned=len(records)),
        launches=tuple(records),
        end=EndRecord(run_id="made", ended_at="2026-03-01T10:20:00Z", cases=len(records), states=states),
    )


def write(made: Run, folder: Path) -> Path:
    """The run in a folder, as a command finds it."""
    with RunWriter(folder) as writer:
        writer.append(made.header)
        for record in made.launches:
            writer.append(record)
        if made.end is not None:
            writer.close(made.header.run_id, interrupted=made.end.interrupted)
    return folder


def unfinished(launches: int, *, interrupted: bool = False, planned: int = 12) -> Run:
    """What a run of twelve launches, or of who knows how many, has written when it stops short of its end."""
    made = run()
    end = EndRecord(run_id="made", ended_at="", cases=launches, states={}, interrupted=True) if interrupted else None
    header = msgspec.structs.replace(made.header, planned=planned)
    return Run(header=header, launches=made.launches[:launches], end=end)


def header(rounds: int, planned: int) -> RunRecord:
    """The first record of a run of :data:`STRATEGIES`."""
    return RunRecord(
        run_id="made",
        refshard="0.1.0",
        started_at="2026-03-01T10:00:00Z",
        suite=SuiteSpec(
            name="quickstart",
            about="Six strategies on two ranks of a laptop.",
            rounds=rounds,
            matrix={"strategy": list(STRATEGIES), "gpus": [2]},
            case={"model": "llama-mini", "global_batch": 8},
        ),
        environment=environment(),
        planned=planned,
    )


def environment() -> Environment:
    """A machine without a GPU."""
    return Environment(
        id="3f9a12c07be4",
        hostname="quiet-oak",
        os="Linux 6.1 (Debian 12)",
        cpu="AMD EPYC 7B13",
        physical_cores=4,
        logical_cores=8,
        memory_bytes=32 * 1024 * MIB,
        gpus=(),
        python="3.11.7",
        torch="2.13.0",
        backends=("gloo",),
        packages={"numpy": "2.4.6", "msgspec": "0.22.0"},
        gemm_flops_per_s=1.25e11,
        gemm_threads=1,
        git_commit="0123456789abcdef",
        git_dirty=True,
        argv=("refshard", "run", "suites/quickstart.toml", "--note", "it's <b>bold</b>"),
    )


CLUSTER = "dgx-h100"
"""Where cases take place that are not measured."""


def spec(strategy: str, world_size: int = 2, fidelity: Fidelity = "measured") -> Case:
    """The spec that all cases share, for one strategy."""
    return Case.of(
        strategy=strategy,
        gpus=world_size,
        model="llama-mini",
        global_batch=8,
        fidelity=fidelity,
        cluster="" if fidelity == "measured" else CLUSTER,
    )


def launch(made: Made, number: int, rounds: int, fidelity: Fidelity = "measured") -> LaunchRecord:
    """One launch that ended ok."""
    case = spec(made.strategy, made.world_size, fidelity)
    drift = 1 + 0.005 * (2 * number - rounds + 1)
    slowest = made.step_time * drift * np.linspace(0.99, 1.01, STEPS)
    fastest = 0.97 * slowest
    return LaunchRecord(
        run_id="made",
        environment="3f9a12c07be4",
        case=case,
        spec_hash=case.hash,
        round=number,
        fidelity=fidelity,
        state="ok",
        started_at="2026-03-01T10:00:00Z",
        duration_s=12.5,
        device="cpu",
        backend="gloo" if made.world_size > 1 else "",
        step_times_s=(tuple(slowest.tolist()), *[tuple(fastest.tolist())] * (made.world_size - 1)),
        losses=losses(made.parity),
        metrics={**metrics(made), **({} if fidelity == "measured" else {"loss_parity": None})},
        flops_convention="B",
        peak_flops_per_s=1.25e11,
        peak_source="measured GEMM, fp32, 1 thread",
        memory_course_bytes=tuple(round(part * made.peak_mib * MIB) for part in (0.5, 1, 0.5)),
        proof=proof(made) if fidelity == "measured" else unheld(proof(made)),
    )


def unheld(made: Proof) -> Proof:
    """The proof of a case that is held against no other."""
    notes = dict.fromkeys(("parity_note", "bits_note"), "compares with nothing")
    return msgspec.structs.replace(made, loss_parity=None, bit_identical_to_ddp=None, **notes)


def both(fidelity: Fidelity) -> Run:
    """A run that holds each case measured, and of this fidelity on :data:`CLUSTER`."""
    measured, other = run(rounds=1, failed=False), run(rounds=1, failed=False, fidelity=fidelity)
    return msgspec.structs.replace(measured, launches=(*measured.launches, *other.launches))


def failure(number: int) -> LaunchRecord:
    """A launch that failed, with an error and a log that attack whoever prints them."""
    case = spec(FAILED)
    return LaunchRecord(
        run_id="made",
        environment="3f9a12c07be4",
        case=case,
        spec_hash=case.hash,
        round=number,
        fidelity="measured",
        state="failed",
        error=f"RuntimeError: mat1 and mat2 shapes differ {HOSTILE}\nsecond line",
        log_tail=(
            "rank 1: starting",
            f"\x1b[31mrank 1: {HOSTILE}\x1b[0m",
            "rank 1: <img src=x onerror=alert(2)>",
        ),
        started_at="2026-03-01T10:10:00Z",
        duration_s=3.25,
        device="cpu",
        backend="gloo",
        metrics=dict.fromkeys(METRICS),
    )


def metrics(made: Made) -> dict[str, float | None]:
    """Every metric of a case."""
    traced = made.compute + made.exposed + made.idle
    return {
        "step_time_s": made.step_time,
        "tokens_per_s_gpu": TOKENS / made.step_time / made.world_size,
        "tflops": 0.004 / made.step_time / made.world_size,
        "mfu": 0.032 / made.step_time / made.world_size,
        "peak_memory_bytes": made.peak_mib * MIB,
        "rss_bytes": (made.peak_mib + 400) * MIB,
        "compute_s": made.compute,
        "comm_s": made.comm,
        "exposed_comm_s": made.exposed,
        "overlap_ratio": 1 - made.exposed / made.comm if made.comm else None,
        "idle_s": made.idle,
        "perturbation": traced / made.step_time,
        "loss_parity": made.parity,
    }


def losses(parity: float) -> tuple[float, ...]:
    """A curve from 6.93 to about 5.1 in 30 steps, off by ``parity`` at every step but the first."""
    steps = np.arange(30)
    curve = 4.93 + 2.0 * np.exp(-steps / 12)
    curve[1:] *= 1 + parity
    return tuple(curve.tolist())


def proof(made: Made) -> Proof:
    """A proof without failures."""
    counts: tuple[CollectiveCount, ...] = ()
    if made.gathers:
        counts = (
            CollectiveCount(op="all_gather", count=2 * made.gathers, bytes=48 * MIB),
            CollectiveCount(op="reduce_scatter", count=made.gathers, bytes=24 * MIB),
        )
    elif made.world_size > 1:
        counts = (CollectiveCount(op="all_reduce", count=2, bytes=24 * MIB),)
    return Proof(
        wrapped_units=("embedding", *(f"layers.{i}" for i in range(made.gathers - 2)), "head"),
        announced=counts,
        traced=counts,
        parity_steps=10,
        loss_parity=made.parity,
        parameters_sha256="ab" * 32,
        bit_identical_to_ddp=made.identical,
        bits_note=made.note,
    )


def with_record(made: Run, place: int, **changes: object) -> Run:
    """The run with one of its launches changed."""
    records = list(made.launches)
    records[place] = msgspec.structs.replace(records[place], **changes)
    return msgspec.structs.replace(made, launches=tuple(records))


def over_network(made: Run, text: str) -> Run:
    """The run with ranks on the network that ``text`` describes."""
    env = msgspec.structs.replace(made.header.environment, network=text)
    return msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, environment=env))


def on_hosts(made: Run, network: NetworkSpec) -> Run:
    """The run with a suite that spreads its ranks over the hosts of ``network``."""
    return over_network(with_suite(made, launcher="netlab", network=network), network.description)


def with_suite(made: Run, **changes: object) -> Run:
    """The run with another suite."""
    suite = msgspec.structs.replace(made.header.suite, **changes)
    return msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, suite=suite))


def with_spec(made: Run, strategies: Mapping[str, int] | None = None, **changes: object) -> Run:
    """The run with the specs of all cases changed, or those of some strategies, which get new world sizes."""
    records = []
    for record in made.launches:
        if strategies is None or record.case.job.strategy in strategies:
            size = record.case.job.gpus if strategies is None else strategies[record.case.job.strategy]
            case = record.case.changed(gpus=size, **changes)
            record = msgspec.structs.replace(record, case=case, spec_hash=case.hash)
        records.append(record)
    return msgspec.structs.replace(made, launches=tuple(records))


def joined(made: Run, *others: Run) -> Run:
    """The run with the launches of others."""
    return msgspec.structs.replace(made, launches=(*made.launches, *(r for one in others for r in one.launches)))


def later(made: Run, name: str, hour: int = 12, **environment: Any) -> Run:
    """The run with another id and start, on a machine that differs in ``environment``."""
    env = msgspec.structs.replace(made.header.environment, **environment)
    started = f"2026-03-01T{hour}:00:00Z"
    header = msgspec.structs.replace(made.header, run_id=name, started_at=started, environment=env)
    return msgspec.structs.replace(made, header=header)


def quicker(made: Run, factor: float) -> Run:
    """The run with every step taking ``factor`` of its time."""
    for place, record in enumerate(made.launches):
        times = tuple(tuple(factor * t for t in steps) for steps in record.step_times_s)
        made = with_record(made, place, step_times_s=times)
    return made


def with_load(made: Run, loads: Mapping[str, Load]) -> Run:
    """The run on a quiet machine, except while some strategies ran."""
    quiet = Load(probe_before_s=0.05, probe_after_s=0.05, other_cores=0.0, cores=2)
    for place, record in enumerate(made.launches):
        made = with_record(made, place, load=loads.get(record.case.job.strategy, quiet))
    return made


def on_gpus(made: Run, *ranks: GpuMemory) -> Run:
    """The run with all cases on GPUs with this memory."""
    for place, record in enumerate(made.launches):
        metrics = {**record.metrics, "peak_reserved_bytes": float(max(one.reserved_bytes for one in ranks))}
        made = with_record(made, place, gpu_memory=ranks, metrics=metrics)
    return made


def gpu_memory(reserved_gib: float, **changes: Any) -> GpuMemory:
    """The memory of a GPU of 79.2 GiB."""
    fields = {
        "allocated_bytes": 60 * GIB, "active_bytes": 61 * GIB, "reserved_bytes": int(reserved_gib * GIB),
        "requested_bytes": 59 * GIB, "retries": 0, "ooms": 0, "used_bytes": int((reserved_gib + 2) * GIB),
        "outside_bytes": 2 * GIB, "total_bytes": int(79.2 * GIB),
    }  # fmt: skip
    return GpuMemory(**{**fields, **changes})
