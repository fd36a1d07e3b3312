"""Several runs joined into one body of evidence."""

from typing import Any

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.records import Run
from refshard.report.run.page import page
from refshard.report.run.verdict import findings
from tests.report.runs import CASES, over_network, run


def later(made: Run, name: str, hour: int = 12, **environment: Any) -> Run:
    """The run, had it another id and started later on a machine that differs in ``environment``."""
    env = msgspec.structs.replace(made.header.environment, **environment)
    started = f"2026-03-01T{hour}:00:00Z"
    header = msgspec.structs.replace(made.header, run_id=name, started_at=started, environment=env)
    return msgspec.structs.replace(made, header=header)


def quicker(made: Run, factor: float) -> Run:
    """The run, had every step taken ``factor`` of its time."""
    records = []
    for record in made.launches:
        times = tuple(tuple(factor * t for t in steps) for steps in record.step_times_s)
        records.append(msgspec.structs.replace(record, step_times_s=times))
    return msgspec.structs.replace(made, launches=tuple(records))


def test_of_a_case_that_several_runs_hold_the_latest_counts() -> None:
    old, new = run(failed=False), later(quicker(run(CASES[:2], failed=False), 0.5), "new")
    for evidence in (gather(old, new), gather(new, old)):
        assert [made.header.run_id for made in evidence.runs] == ["made", "new"]
        assert evidence.latest is evidence.runs[-1]
        runs = {case.strategy: case.header.run_id for case in evidence.cases}
        times = {case.strategy: case.metrics["step_time_s"] for case in evidence.cases}
        assert (runs["ddp"], runs["fsdp2"]) == ("new", "made")
        assert (times["ddp"], times["fsdp2"]) == pytest.approx((0.025, 0.060), rel=1e-3)


def test_cases_are_numbered_in_their_order() -> None:
    assert [case.number for case in gather(run()).cases] == list(range(6))


def test_settings_keep_the_order_in_which_the_suite_gives_their_axes() -> None:
    """Not that of the alphabet, in which "bf16" comes first."""
    made = run(CASES[:2], rounds=1, failed=False)
    records = [
        msgspec.structs.replace(record, case=record.case.changed(**axes))
        for axes in ({"precision": "bf16"}, {"microbatches": 2}, {"checkpointing": "full"})
        for record in made.launches
    ]
    shared = {"model": made.launches[0].case.job.model, "gpus": 2, "global_batch": 4, "strategy": ["ddp", "fsdp2"]}
    matrix = [{**shared, "microbatches": 2}, {**shared, "checkpointing": "full"}, {**shared, "precision": "bf16"}]
    suite = msgspec.structs.replace(made.header.suite, matrix=matrix)
    header = msgspec.structs.replace(made.header, suite=suite)
    settings = gather(msgspec.structs.replace(made, header=header, launches=tuple(reversed(records)))).settings
    assert [setting.cases[0].spec.axes for setting in settings] == [
        ("2 microbatches",),
        ("checkpointing full",),
        ("bf16",),
    ]


def test_a_longer_time_limit_keeps_nobody_out_of_a_ranking() -> None:
    made = run(failed=False)
    patient = made.launches[-1].case.changed(time_limit_s=900.0)
    cases = (*made.launches[:-1], msgspec.structs.replace(made.launches[-1], case=patient))
    assert len(gather(msgspec.structs.replace(made, launches=cases)).settings) == len(gather(made).settings)


def test_of_cases_that_differ_in_time_limit_only_the_most_patient_is_compared_and_all_are_kept() -> None:
    """Such as the references of a suite that gives one strategy more time."""
    made = run(failed=False)
    patient = [
        msgspec.structs.replace(record, case=record.case.changed(time_limit_s=900.0)) for record in made.launches
    ]
    both = gather(msgspec.structs.replace(made, launches=(*patient[:1], *made.launches, *patient[1:])))
    alone = gather(made)
    assert len(both.cases) == 2 * len(alone.cases)
    for found, known in ((both.settings, alone.settings), (both.trainings, alone.trainings)):
        assert [len(setting.cases) for setting in found] == [len(setting.cases) for setting in known]
        assert {case.spec.protocol.time_limit_s for setting in found for case in setting.cases} == {900.0}
    assert "".join(page(both))


def test_machines_are_never_in_one_setting_and_are_named() -> None:
    there = later(run(failed=False), "there", id="bbbbbbbbbbbb", hostname="loud-elm")
    evidence = gather(run(failed=False), there)
    assert len(evidence.cases) == 2 * len(CASES)
    assert [setting.label.rpartition(", ")[2] for setting in evidence.settings] == ["on quiet-oak", "on loud-elm"]
    assert len(evidence.trainings) == 2
    assert {case.full_label for case in evidence.cases} >= {"ddp, 2 ranks, on quiet-oak", "ddp, 2 ranks, on loud-elm"}


@pytest.mark.parametrize(
    ("other", "names"), [({"id": "bb"}, ["(3f9a12c07be4)", "(bb)"]), ({}, ["(3f9a12c07be4)", "wire)"])]
)
def test_machines_of_one_name_are_told_apart_by_hash_or_network(other: dict[str, Any], names: list[str]) -> None:
    there = later(run(failed=False), "there", **other)
    joined = there if other else over_network(there, "wire")
    labels = [setting.label for setting in gather(run(failed=False), joined).settings]
    assert [label.rpartition(" ")[2] for label in labels] == names


def test_batches_per_rank_and_global_ones_do_not_mix() -> None:
    """Two suites hold equal specs; one compares world sizes at the global batch, the other at that of a rank."""
    fixed = later(run(CASES[2:3], failed=False), "fixed")
    suite = msgspec.structs.replace(fixed.header.suite, case={"model": "llama-mini", "batch_per_rank": 4})
    fixed = msgspec.structs.replace(fixed, header=msgspec.structs.replace(fixed.header, suite=suite))
    labels = [setting.label for setting in gather(run(CASES[:2], failed=False), fixed).settings]
    assert [label.removeprefix("llama-mini, ") for label in labels] == [
        "global batch of 8 sequences of 256 tokens", "4 sequences of 256 tokens per rank",
    ]  # fmt: skip


def test_a_suite_at_a_batch_per_rank_takes_no_case_from_a_ranking_at_a_global_one() -> None:
    """The same spec in both: each ranking keeps its own."""
    whole, fixed = run(failed=False), later(run(CASES[1:2], failed=False), "fixed")
    suite = msgspec.structs.replace(fixed.header.suite, name="weak", case={"model": "llama-mini", "batch_per_rank": 4})
    fixed = msgspec.structs.replace(fixed, header=msgspec.structs.replace(fixed.header, suite=suite))
    evidence = gather(whole, fixed)
    by_setting = {setting.label: set(setting.strategies) for setting in evidence.settings}
    assert by_setting["llama-mini, global batch of 8 sequences of 256 tokens"] >= {"ddp", "fsdp2", "refshard-yafsdp"}
    assert by_setting["llama-mini, 4 sequences of 256 tokens per rank"] == {"ddp"}
    labels = [case.full_label for case in evidence.cases if case.strategy == "ddp"]
    assert labels == ["ddp, 2 ranks, of quickstart", "ddp, 2 ranks, of weak"]


def test_a_copy_of_a_run_is_no_second_run() -> None:
    assert len(gather(run(), run()).runs) == 1


def test_candidates_of_several_runs_are_doubted() -> None:
    one, other = run(CASES[1:2], rounds=3, failed=False), later(run(CASES[2:3], rounds=3, failed=False), "other")
    (found,) = findings(gather(one, other))
    assert found.caveats[0].startswith("the cases come from several runs")
    (alone,) = findings(gather(run(CASES[1:3], rounds=3, failed=False)))
    assert alone.caveats == ()


def test_rounds_of_two_runs_are_not_paired() -> None:
    """Paired, the ratio of two series of equal drift has no width; of two runs it has that of the drift."""
    one, other = run(CASES[1:2], rounds=3, failed=False), later(run(CASES[2:3], rounds=3, failed=False), "other")
    (apart,) = findings(gather(one, other))
    (together,) = findings(gather(run(CASES[1:3], rounds=3, failed=False)))
    assert "fsdp2 takes 60.0 ms, 20.0 % longer, paired by round (95 % interval 20.0 to 20.0 %" in together.margin
    assert "fsdp2 takes 60.0 ms, 20.0 % longer (95 % interval 14.8 to 25.4 %" in apart.margin


def test_there_must_be_a_run() -> None:
    with pytest.raises(ValueError, match="one run or more, got none"):
        gather()
