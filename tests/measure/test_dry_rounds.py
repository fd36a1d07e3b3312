"""Rounds of dry runs, with dry runs that are made up: which configurations they take, and when they stop."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.dryrun.request import Pool
from refshard.measure.dry.proxies import Extrapolated, Proxies, Setting, closed, extrapolate, proxies_of
from refshard.measure.dry.rank import DryResult, StepResult
from refshard.measure.dry.rounds import Rounds, dry_run_rounds
from refshard.quantities import GIB, format_bytes
from refshard.records import Census, StepTrace
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Job
from refshard.specs.model import load_model
from tests.plan.made import job as made_job


def planned(**fields: Any) -> Job:
    """A row of a plan for eight nodes."""
    return made_job(cluster="dgx-h100x8", seq_len=4096, checkpointing="none", **fields)


USABLE_BYTES = 70 * GIB
SETTING = Setting(model=load_model("llama3-8b"), cluster=load_cluster("dgx-h100x8"))
ROWS = [
    planned(dp_shard=64, tp=1),
    planned(dp_shard=32, tp=2),
    planned(dp_shard=16, tp=4),
    planned(dp_shard=32, cp=2),
    planned(dp_shard=16, cp=4),
]
TRACE = StepTrace(rank=0, step=1, span_ns=1, compute_ns=1, comm_ns=0, exposed_ns=0, idle_ns=0)
CENSUS = Census(operators=0, allocations=0, allocated_bytes=0, order_sha256="", stream_waits=0)


def ended(case: Case, beyond_bytes: int) -> tuple[DryResult, ...]:
    """A dry run that takes a second and needs so much more than in closed form."""
    peak = round(closed(case.job, SETTING, load_model(case.job.model).n_layers).peak_bytes) + beyond_bytes
    pool = Pool(allocated=peak, active=peak, reserved=peak, requested=peak)
    step = StepResult(step_s=1.0, trace=TRACE, issued=(), census=CENSUS, memory_course_bytes=(), host_waits={})
    return (DryResult(state="ok", peak=pool, steps=(step,)),)


class Faked:
    """Dry runs of which ``beyond`` says what they need more; each configuration takes 5 seconds."""

    def __init__(self, beyond: Callable[[Case], int]) -> None:
        self._beyond = beyond
        self.rounds: list[set[tuple[int, int]]] = []
        self.limits_s: list[float] = []
        self.now_s = 0.0

    def __call__(self, cases: Sequence[Case], work: Path, *, time_limit_s: float) -> list[tuple[DryResult, ...]]:
        self.rounds.append({(case.job.tp, case.job.cp) for case in cases})
        self.limits_s.append(time_limit_s)
        self.now_s += 5.0 * len(self.rounds[-1])
        return [ended(case, self._beyond(case)) for case in cases]

    def clock(self) -> float:
        return self.now_s


def found(
    rows: Sequence[Job], fake: Faked, folder: Path, step_s: Sequence[float] = (), **changes: Any
) -> dict[int, Extrapolated | str]:
    rounds = Rounds(**{"count": 2, "usable_bytes": USABLE_BYTES, "each_s": 120.0, "all_s": 45.0, **changes})
    return dry_run_rounds(rows, step_s or [1.0] * len(rows), SETTING, folder, rounds, fake, fake.clock)


def split_over_tensors(case: Case) -> int:
    return 100 * GIB if case.job.tp > 1 else 0


def test_the_first_ones_are_enough_if_they_fit(tmp_path: Path) -> None:
    fake = Faked(lambda _: 0)
    got = found(ROWS, fake, tmp_path)
    assert fake.rounds == [{(1, 1), (2, 1)}]
    assert fake.limits_s == [240.0]
    assert sorted(got) == [0, 1]
    assert all(isinstance(one, Extrapolated) and one.allocated_bytes <= USABLE_BYTES for one in got.values())


def test_as_many_more_are_taken_as_do_not_fit(tmp_path: Path) -> None:
    fake = Faked(split_over_tensors)
    got = found(ROWS, fake, tmp_path)
    assert fake.rounds == [{(1, 1), (2, 1)}, {(4, 1)}, {(1, 2)}]
    assert [one.allocated_bytes <= USABLE_BYTES for one in got.values() if isinstance(one, Extrapolated)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert got[1].beyond_bytes == got[2].beyond_bytes == 100 * GIB  # type: ignore[union-attr]


@pytest.mark.parametrize(("all_s", "rounds"), [(45.0, 3), (20.0, 3), (19.0, 2), (15.0, 2), (14.0, 1), (5.0, 1)])
def test_no_round_begins_that_would_take_too_long(all_s: float, rounds: int, tmp_path: Path) -> None:
    fake = Faked(split_over_tensors)
    found(ROWS, fake, tmp_path, all_s=all_s)
    assert len(fake.rounds) == rounds
    assert fake.limits_s[1:] == [all_s - 10.0, all_s - 15.0][: rounds - 1]


def test_others_of_a_kind_that_needs_more_are_skipped(tmp_path: Path) -> None:
    """Unless they fit though they need as much more."""
    like = [planned(dp_shard=16, dp_replicate=2, tp=2) for _ in range(3)]
    fake = Faked(split_over_tensors)
    got = found([*ROWS[:2], *like, ROWS[3]], fake, tmp_path)
    assert fake.rounds == [{(1, 1), (2, 1)}, {(1, 2)}]
    assert "similar dry runs need 100 GiB more than their closed form, so this one would need " in str(got[2])
    assert f", of {format_bytes(USABLE_BYTES)} usable" in str(got[2])
    modest = Faked(lambda case: GIB if case.job.tp > 1 else 0)
    assert isinstance(found([*ROWS[1:2], *like], modest, tmp_path, count=3)[2], Extrapolated)


@pytest.mark.parametrize(("of_another_s", "rounds"), [(1.14, [{(1, 1), (1, 4)}]), (1.16, [{(1, 1), (2, 1)}])])
def test_the_best_of_a_strategy_that_is_nearly_as_fast_comes_first(
    of_another_s: float, rounds: list[set[tuple[int, int]]], tmp_path: Path
) -> None:
    other = planned(strategy="ddp", dp_shard=16, cp=4)
    fake = Faked(lambda _: 0)
    got = found([*ROWS[:4], other], fake, tmp_path, [1.0, 1.01, 1.02, 1.03, of_another_s], usable_bytes=300 * GIB)
    assert fake.rounds == rounds
    assert len(got) == 2


def test_what_cannot_be_dry_run_says_why(tmp_path: Path) -> None:
    rows = [planned(strategy="megatron", dp_shard=64), *ROWS]
    fake = Faked(lambda _: 0)
    got = found(rows, fake, tmp_path, count=1)
    assert got[0] == "refshard does not run megatron"
    assert fake.rounds == [{(1, 1)}]


def test_it_ends_when_there_are_no_more(tmp_path: Path) -> None:
    fake = Faked(lambda _: 100 * GIB)
    assert sorted(found(ROWS[:3], fake, tmp_path)) == [0, 1, 2]


def test_a_dry_run_that_failed_is_no_row_that_fits(tmp_path: Path) -> None:
    class Failing(Faked):
        def __call__(self, cases: Sequence[Case], work: Path, *, time_limit_s: float) -> Any:
            done = super().__call__(cases, work, time_limit_s=time_limit_s)
            bad = msgspec.structs.replace(done[0][0], state="failed", error="no")
            return [(bad,) if case.job.tp == 2 else one for case, one in zip(cases, done)]

    got = found(ROWS, Failing(lambda _: 0), tmp_path)
    assert got[1] == "no"
    assert isinstance(got[2], Extrapolated)


def test_ranks_that_are_late_count_though_none_is_in_a_dry_run(tmp_path: Path) -> None:
    """As in closed form, since every dry run here takes a second whatever its depth."""
    one = planned(dp_shard=64)
    proxies = proxies_of(one, SETTING, tmp_path)
    assert isinstance(proxies, Proxies)
    ran = extrapolate(proxies, SETTING, {point: ended(case, 0) for point, case in proxies.cases.items()})
    assert isinstance(ran, Extrapolated)
    late_s = closed(one, SETTING, SETTING.model.n_layers).late_s
    assert late_s > 0.005
    assert ran.step_s == pytest.approx(1 + late_s)
