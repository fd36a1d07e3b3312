"""What changed since a baseline: known answers."""

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.records import Census, GpuSettings, Run
from refshard.report.run.compare import Against, against
from refshard.report.run.origin import environment, environment_differences
from tests.report.printed import rows
from tests.report.runs import CASES, later, quicker, run, with_record


def compared(now: Run, before: Run) -> Against:
    return against(gather(now), gather(before))


def ratios(found: Against) -> list[str]:
    return [row["now / then (95 % interval)"] for row in rows(found.table("then", "now"))]


def by_label(found: Against) -> dict[str, str]:
    return {one.case.strategy: one.outcome for one in found.changed}


def steady(made: Run) -> Run:
    """The run, had its machine not drifted by 0.5 % a round."""
    first = {record.case: record.step_times_s for record in reversed(made.launches)}
    records = [msgspec.structs.replace(record, step_times_s=first[record.case]) for record in made.launches]
    return msgspec.structs.replace(made, launches=tuple(records))


BEFORE = run(rounds=3, failed=False)


@pytest.mark.parametrize(
    ("factor", "outcome", "lead"),
    [
        (1.1, "slower", "Slower than in made: "),
        (0.9, "faster", "Faster than in made: "),
        (1.001, "unchanged", "5 matching cases: 5 within 2.5 %."),
    ],
)
def test_a_change_is_told_with_its_interval(factor: float, outcome: str, lead: str) -> None:
    before = steady(BEFORE) if outcome == "unchanged" else BEFORE
    found = compared(later(quicker(before, factor), "now"), before)
    assert set(by_label(found).values()) == {outcome}
    assert found.sentences[0].startswith(lead)
    assert len(found.changed) == 5
    assert found.worse == (outcome == "slower")
    if outcome == "slower":
        assert "ddp, 2 ranks 10.0 % longer (times 1.053 to 1.150)" in found.sentences[0]


def test_an_interval_that_holds_no_change_and_a_large_one_is_unknown() -> None:
    before = run(CASES[1:2], failed=False)
    noisy = before
    for place, time in enumerate((0.040, 0.050, 0.060)):
        noisy = with_record(noisy, place, step_times_s=((time,),))
    found = compared(later(noisy, "now"), before)
    assert by_label(found) == {"ddp": "unknown"}
    assert found.sentences == ["No verdict: 1 matching case: 1 too noisy to tell."]
    assert not found.decides
    assert not found.worse


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("factor", [0.614, 1.8])
def test_under_three_launches_of_either_side_no_word_says_shorter(few: int, factor: float) -> None:
    """The same code once came out "38.6 % shorter" from one launch of each side."""
    short, long = run(CASES[1:2], rounds=few, failed=False), run(CASES[1:2], failed=False)
    for now, then in ((short, short), (short, long), (long, short)):
        found = compared(later(quicker(now, factor), "now"), then)
        assert by_label(found) == {"ddp": "not compared"}
        assert found.sentences == [f"No verdict: 1 matching case: 1 times not compared (n = {few}: no interval)."]
        assert ratios(found)[0].endswith(f" (n = {few}: no interval)")
        assert not found.worse


def test_another_machine_compares_exact_metrics_that_travel_and_no_time() -> None:
    there = later(BEFORE, "there", id="bbbbbbbbbbbb")
    found = compared(there, BEFORE)
    assert set(by_label(found).values()) == {"not compared"}
    assert set(ratios(found)) == {"another machine"}
    other = with_record(there, 1, losses=(1.0, 2.0))
    assert all(one.exact == () for one in compared(other, BEFORE).changed), "losses may differ between processors"
    assert any(one.exact for one in compared(with_record(later(BEFORE, "now"), 1, losses=(1.0, 2.0)), BEFORE).changed)


def test_of_several_machines_the_baselines_own_is_compared() -> None:
    before = steady(BEFORE)
    there = later(quicker(before, 2.0), "there", id="bbbbbbbbbbbb")
    found = against(gather(later(before, "now", 13)), gather(before, there))
    assert set(by_label(found).values()) == {"unchanged"}


def test_an_exact_change_is_told_however_equal_the_times() -> None:
    census = Census(operators=100, allocations=10, allocated_bytes=1000, order_sha256="aa")
    before = with_record(BEFORE, 1, census=census)
    now = with_record(BEFORE, 1, census=msgspec.structs.replace(census, operators=121))
    found = compared(later(now, "now"), before)
    assert found.worse
    assert "Exact metrics changed in 1 of 5 cases" in found.sentences[0]
    assert "ddp, 2 ranks, operators 100 to 121 (regressed)" in found.sentences[0]


def test_what_one_refshard_did_not_record_is_no_change() -> None:
    census = Census(operators=100, allocations=10, allocated_bytes=1000, order_sha256="aa")
    found = compared(with_record(later(BEFORE, "now"), 1, census=census), BEFORE)
    assert not any(one.exact for one in found.changed)


def test_a_case_that_broke_is_worse() -> None:
    broken = with_record(later(BEFORE, "now"), 1, state="oom", error="too large")
    found = compared(broken, BEFORE)
    assert found.worse
    assert "Ended ok in made but not here: ddp, 2 ranks." in found.sentences
    assert ratios(found)[1] == "now oom"


def test_what_one_side_alone_holds_is_counted() -> None:
    found = compared(later(run(CASES[:3], rounds=3, failed=False), "now"), BEFORE)
    assert found.caveats[-1] == "2 cases are only in the earlier run"
    strangers = compared(later(run(CASES[3:], rounds=3, failed=False), "now"), run(CASES[:2], rounds=3, failed=False))
    assert strangers.sentences == ["No verdict: no case is also in made."]
    assert strangers.changed == []


def test_a_reference_counts_like_any_other() -> None:
    before = run(CASES[:1], rounds=3, failed=False)
    found = compared(later(quicker(before, 2.0), "now"), before)
    assert found.worse
    assert found.sentences[0].startswith("Slower than in made: single, 1 rank 100.0 % longer")


def test_where_nothing_exact_was_compared_nothing_is_said_to_be_the_same() -> None:
    before = with_record(BEFORE, 1, state="failed", error="x", proof=None)
    before = with_record(with_record(before, 6, state="failed", proof=None), 11, state="failed", proof=None)
    found = compared(later(BEFORE, "now"), before)
    texts = {row["case"]: row["exact metrics"] for row in rows(found.table("then", "now"))}
    assert (texts["ddp, 2 ranks"], texts["fsdp2, 2 ranks"]) == ("-", "the same")


def test_simulated_times_have_no_interval_and_need_no_machine() -> None:
    before = run(CASES[1:2], rounds=1, failed=False, fidelity="simulated")
    found = compared(later(quicker(before, 1.2), "now", id="bbbbbbbbbbbb"), before)
    assert by_label(found) == {"ddp": "slower"}
    assert found.sentences[0] == "Slower than in made: ddp, 2 ranks, simulated on dgx-h100 20.0 % longer."


def test_environments_differ_by_label_with_one_value_if_all_gpus_agree() -> None:
    gpu = GpuSettings(power_limit_w=700.0, ecc=True)
    capped = msgspec.structs.replace(gpu, power_limit_w=500.0)
    one = later(BEFORE, "one", gpus=("H100",) * 2, gpu_settings=(gpu, gpu), gpu_driver="570", torch="2.14.0")
    now = later(
        BEFORE, "now", gpus=("H100",) * 2, gpu_settings=(gpu, capped), gpu_driver="580", tf32=True,
        variables={"NCCL_ALGO": "Tree"}, gpu_throttled=((), ("power cap",)), torch="2.14.0",
    )  # fmt: skip
    table = rows(environment_differences([one, now]))
    assert {row["field"]: (row["one"], row["now"]) for row in table} == {
        "GPU driver": ("570", "580"), "fp32 products": ("-", "TF32 allowed"), "variables": ("-", "NCCL_ALGO Tree"),
        "power limit w": ("700.0", "GPU 0: 700.0; GPU 1: 500.0"), "throttled at the start": ("-", "GPU 1: power cap"),
    }  # fmt: skip
    assert environment_differences([BEFORE]).rows == []
    assert "GPU driver" not in environment(BEFORE)
