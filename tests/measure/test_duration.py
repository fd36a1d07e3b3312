"""How long a suite will take: what earlier launches took, else what its FLOPs say."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.measure.duration import Expected, earlier_launches, expected, recorded_folders
from refshard.specs.suite import SuiteSpec, find_suite, load_suite
from tests.measure.fakes import make_suite
from tests.report.runs import run, with_record, write


def estimated(suite: SuiteSpec | None = None, **case: Any) -> Expected:
    shared = {"global_batch": 4, "measured_steps": 3, "traced_steps": 1, "device": "cpu"}
    return expected(suite or make_suite(case={**shared, **case}), {})


def test_what_earlier_launches_took_counts_first() -> None:
    suite = make_suite(rounds=2)
    cases = suite.cases()
    all_ = expected(suite, {case.hash: 10.0 * (place + 1) for place, case in enumerate(cases)})
    assert all_ == Expected(seconds=2 * (10 + 20 + 30), launches=6, seen_before=6, unknown=0)
    one = expected(suite, {cases[0].hash: 1000.0})
    assert (one.seen_before, one.launches) == (2, 6)
    assert one.seconds > 2000


@pytest.mark.parametrize(
    "more", [{"seq_len": 2048}, {"global_batch": 64}, {"measured_steps": 300}, {"warmup_steps": 200}], ids=str
)
def test_an_estimate_grows_with_the_flops(more: dict[str, Any]) -> None:
    assert estimated(**more).seconds > estimated().seconds


def test_an_estimate_grows_with_the_model_and_the_rounds() -> None:
    larger = make_suite(matrix={"strategy": ["single", "ddp", "refshard-yafsdp"], "gpus": 2, "model": "llama-mini"})
    assert estimated(larger).seconds > estimated(make_suite()).seconds
    assert estimated(make_suite(rounds=4)).seconds == pytest.approx(4 * estimated(make_suite()).seconds)
    assert estimated().unknown == estimated().seen_before == 0


def test_ranks_that_are_not_here_compute_nothing_here(tmp_path: Path) -> None:
    emulated = {"fidelity": "emulated", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "device": "cpu"}
    of = {"strategy": "ddp", "model": "llama-mini", "seq_len": 512}
    alone = make_suite(matrix={**of, **emulated}, case={})
    two = make_suite(matrix={**of, **emulated, "resident_ranks": 2}, case={})
    assert estimated(alone).seconds < estimated(two).seconds


def test_the_time_on_gpus_that_have_run_nothing_is_not_known() -> None:
    shared = {"global_batch": 4, "measured_steps": 3, "traced_steps": 1}
    here = {device: make_suite(case={**shared, "device": device}) for device in ("cpu", "cuda", "auto")}
    assert [expected(suite, {}).unknown for suite in here.values()] == [0, 3, 0]
    assert [expected(suite, {}, gpus=True).unknown for suite in here.values()] == [0, 3, 3]
    known = expected(here["cuda"], {case.hash: 5.0 for case in here["cuda"].cases()}, gpus=True)
    assert (known.unknown, known.seconds) == (0, 15)


def test_a_dry_run_takes_as_long_wherever_it_is() -> None:
    matrix = {"strategy": "ddp", "model": "llama3-8b", "gpus": 8, "fidelity": "dryrun", "cluster": "dgx-h100"}
    found = expected(make_suite(matrix=matrix, case={"batch_per_rank": 1}), {}, gpus=True)
    assert (found.launches, found.unknown) == (1, 0)
    assert 1 < found.seconds < 60


def test_earlier_launches_are_the_median_of_those_that_ended_ok(tmp_path: Path) -> None:
    """Links, damaged runs and launches that failed count for nothing."""
    made = run(rounds=3, failed=False)
    ddp = [place for place, record in enumerate(made.launches) if record.case.job.strategy == "ddp"]
    for place, seconds in zip(ddp, (4.0, 100.0, 6.0)):
        made = with_record(made, place, duration_s=seconds)
    write(made, tmp_path / "first")
    other = msgspec.structs.replace(made, launches=tuple(made.launches[place] for place in ddp[:1]))
    write(with_record(other, 0, duration_s=8.0), tmp_path / "second")
    write(with_record(other, 0, duration_s=0.1, state="failed"), tmp_path / "third")
    (tmp_path / "latest").symlink_to(tmp_path / "second")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "records.jsonl").write_text("no\n")
    found = earlier_launches([tmp_path, tmp_path / "none"])
    assert found[made.launches[ddp[0]].spec_hash] == pytest.approx(7.0)
    assert len(found) == 5


def test_runs_that_ship_know_the_quickstart() -> None:
    quickstart = load_suite(find_suite("quickstart"))
    found = expected(quickstart, earlier_launches(recorded_folders()))
    assert found.seen_before == found.launches == 18
