"""A launcher that starts nothing: it leaves what ranks would have left, so that scheduling is tested without time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

import msgspec

from refshard.flops import flops_per_token
from refshard.measure.launchers.base import Launcher, LaunchOutcome, Program, RankEnd, Ranks, check_fits_machine
from refshard.measure.rank import RankResult, rank_file, series_folder, trace_file
from refshard.measure.run import Observer
from refshard.measure.worker import request_file
from refshard.quantities import GIB
from refshard.records import Census, CollectiveCount, Environment, LaunchRecord
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.specs.reading import convert
from refshard.specs.suite import SuiteSpec
from tests.analysis.handmade import event, shaped, step, write

ANNOUNCED = (CollectiveCount(op="all_reduce", count=1, bytes=400),)
CENSUS = Census(operators=10, allocations=4, allocated_bytes=640, order_sha256="0123456789abcdef" * 4)


def rank_result(case: Case, rank: int, **changes: Any) -> RankResult:
    """A plausible result: step times 0.1, 0.2, ... s (0.05 s more on each further rank), the same losses everywhere."""
    job = case.job
    alone = job.strategy == "single"
    blocks = tuple(f"model.layers.{i}" for i in range(load_model(job.model).n_layers))
    fields: dict[str, Any] = {
        "rank": rank,
        "state": "ok",
        "device": "cpu",
        "backend": "gloo",
        "step_times_s": tuple(0.1 * (i + 1) + 0.05 * rank for i in range(case.protocol.measured_steps)),
        "traced_step_times_s": (0.3,) * case.protocol.traced_steps,
        "losses": tuple(5.0 - 0.1 * i for i in range(case.protocol.total_steps)),
        "peak_memory_bytes": 1000 * (rank + 1),
        "rss_bytes": 5000,
        "blocks": blocks,
        "wrapped_units": () if alone else blocks,
        "announced": () if alone else ANNOUNCED,
        "parameters_sha256": "same",
        "census": CENSUS,
        "flops_per_token": float(flops_per_token(load_model(job.model), job.seq_len, workload=job.workload)),
    }
    return RankResult(**{**fields, **changes})


def write_rank(case: Case, folder: Path, rank: int, **changes: Any) -> None:
    """Leave a rank's result and a trace of one 100 us step: compute [10, 60), an all-reduce [40, 80)."""
    rank_file(folder, rank).write_bytes(msgspec.json.encode(rank_result(case, rank, **changes)))
    events = [step(1, 0, 100), event("aten::mm", 10, 50)]
    if case.job.strategy != "single":
        events += [
            event("c10d::allreduce_", 5, 1, **shaped([[[100]], []], ["TensorList", ""])),
            event("gloo:all_reduce", 40, 40, cat="user_annotation", tid=2, **shaped([[100]], ["float"])),
        ]
    write(trace_file(folder, rank), events, rank=rank)


class Ended(Ranks):
    """Ranks that end after they have been looked at once, as the ``outcome`` says."""

    pause_s = 0.0
    ran_s = 0.0

    def __init__(self, outcome: LaunchOutcome, progress: str) -> None:
        self._outcome, self._progress, self._polled = outcome, progress, False

    def poll(self) -> tuple[RankEnd, ...] | None:
        before, self._polled = self._polled, True
        return () if before else None

    def outcome(self, ends: tuple[RankEnd, ...]) -> LaunchOutcome:
        return self._outcome

    def ask(self) -> None:
        raise NotImplementedError

    def end(self, number: Signals) -> tuple[RankEnd, ...]:
        return ()

    def progress(self) -> str:
        return self._progress


class StandIn(Launcher):
    """Calls ``ranks(program, folder)``, which leaves what ranks would leave and returns how they ended."""

    def __init__(self, ranks: Callable[[Program, Path], LaunchOutcome], progress: str = "measure 1/1") -> None:
        self._ranks, self._shown = ranks, progress

    @contextmanager
    def start(self, program: Program, folder: Path) -> Iterator[Ranks]:
        yield Ended(self._ranks(program, folder), self._shown)

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        check_fits_machine(case, case.processes, oversubscribe=oversubscribe)

    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        return ENVIRONMENT


class FakeLauncher(StandIn):
    """Calls ``outcome(case, folder)`` for each launch; by default every rank leaves a good result."""

    def __init__(self, outcome: Callable[[Case, Path], LaunchOutcome] | None = None) -> None:
        super().__init__(self._launched)
        self.launched: list[Case] = []
        self.series: list[list[Case]] = []
        self._outcome = outcome or good

    def _launched(self, program: Program, folder: Path) -> LaunchOutcome:
        data = request_file(folder, program.name).read_bytes()
        if program.name == "series":
            cases = msgspec.json.decode(data, type=list[Case])
            assert program.time_limit_s == sum(case.protocol.time_limit_s for case in cases)
            self.series.append(cases)
            return [self._outcome(case, series_folder(folder, index)) for index, case in enumerate(cases)][-1]
        case = msgspec.json.decode(data, type=Case)
        assert program == Program(name="case", processes=case.processes, time_limit_s=case.protocol.time_limit_s)
        self.launched.append(case)
        return self._outcome(case, folder)


def leaving(strategy: str, *ranks: dict[str, Any], launch: LaunchOutcome | None = None) -> FakeLauncher:
    """Every rank leaves a good result, with the changes of ``ranks`` (of the last one, if there are more ranks) in
    cases of ``strategy`` or, if that is empty, in all but references; launches of these end as ``launch`` says.
    """

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        mine = case.job.strategy == strategy if strategy else case != case.reference()
        for rank in range(case.processes):
            write_rank(case, folder, rank, **(ranks[min(rank, len(ranks) - 1)] if mine and ranks else {}))
        return (launch if mine else None) or LaunchOutcome()

    return FakeLauncher(outcome)


def good(case: Case, folder: Path) -> LaunchOutcome:
    """Every rank ends well."""
    for rank in range(case.processes):
        write_rank(case, folder, rank)
    return LaunchOutcome()


ENVIRONMENT = Environment(
    id="e", hostname="h", os="Linux", cpu="c", physical_cores=1, logical_cores=2, memory_bytes=64 * GIB, gpus=(),
    python="3.11", torch="2.13.0", backends=("gloo",), packages={}, gemm_flops_per_s=1e11, gemm_threads=1,
    git_commit=None, git_dirty=None, argv=("refshard",),
)  # fmt: skip


class Silent(Observer):
    """Shows nothing and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def case_started(self, case: Case, round_: int, index: int, total: int) -> None:
        self.told.append(f"start {index + 1}/{total} {case.job.strategy} {round_}")

    def case_progressed(self, text: str) -> None:
        self.told.append(text)

    def case_ended(self, record: LaunchRecord) -> None:
        self.told.append(f"end {record.state}")


def make_suite(**changes: Any) -> SuiteSpec:
    """Three strategies on two ranks."""
    fields: dict[str, Any] = {
        "name": "fake",
        "matrix": {"strategy": ["single", "ddp", "refshard-yafsdp"], "gpus": [2], "model": ["llama-tiny"]},
        "case": {"global_batch": 4, "measured_steps": 3, "traced_steps": 1, "device": "cpu"},
    }
    return convert({**fields, **changes}, SuiteSpec, where="suite")
