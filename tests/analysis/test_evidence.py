"""Cases of one run or of several, sorted into settings."""

from typing import Any

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.report.run.page import page
from tests.report.runs import (
    CASES,
    STRATEGIES,
    both,
    joined,
    later,
    over_network,
    quicker,
    run,
    with_spec,
    with_suite,
)

GLOBAL = "llama-mini, global batch of 8 sequences of 256 tokens"
PER_RANK = {"case": {"model": "llama-mini", "batch_per_rank": 4}}
ONE = run(rounds=1, failed=False)


def labels(evidence: Evidence) -> list[str]:
    return [setting.label.removeprefix(GLOBAL) for setting in evidence.settings]


def test_the_latest_of_several_runs_counts() -> None:
    old, new = run(failed=False), later(quicker(run(CASES[:2], failed=False), 0.5), "new")
    for evidence in (gather(old, new), gather(new, old, old)):
        assert [made.header.run_id for made in evidence.runs] == ["made", "new"]
        assert evidence.latest is evidence.runs[-1]
        by_name = {case.strategy: (case.header.run_id, case.metrics["step_time_s"]) for case in evidence.cases}
        assert (by_name["ddp"][0], by_name["fsdp2"][0]) == ("new", "made")
        assert (by_name["ddp"][1], by_name["fsdp2"][1]) == pytest.approx((0.025, 0.060), rel=1e-3)
    with pytest.raises(ValueError, match="one run or more, got none"):
        gather()


def test_settings_keep_the_order_in_which_the_suite_gives_their_axes() -> None:
    """Not that of the alphabet, in which "bf16" comes first."""
    axes: list[dict[str, Any]] = [{"microbatches": 2}, {"checkpointing": "full"}, {"precision": "bf16"}]
    made = run(CASES[:2], rounds=1, failed=False)
    shared = {"model": "llama-mini", "gpus": 2, "global_batch": 4, "strategy": ["ddp", "fsdp2"]}
    found = joined(*(with_spec(made, **one) for one in reversed(axes)))
    evidence = gather(with_suite(found, matrix=[{**shared, **one} for one in axes]))
    assert labels(evidence) == [", 2 microbatches", ", checkpointing full", ", bf16"]


def test_the_longest_time_limit_is_compared_and_all_cases_are_kept() -> None:
    """Such as the references of a suite that gives one strategy more time."""
    made = run(failed=False)
    evidence, alone = gather(joined(made, with_spec(made, time_limit_s=900.0))), gather(made)
    assert len(evidence.cases) == 2 * len(alone.cases)
    for found, known in ((evidence.settings, alone.settings), (evidence.trainings, alone.trainings)):
        assert [len(setting.cases) for setting in found] == [len(setting.cases) for setting in known]
        assert {case.spec.protocol.time_limit_s for setting in found for case in setting.cases} == {900.0}
    assert "".join(page(evidence))


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        ({"id": "bb", "hostname": "loud-elm"}, ["on quiet-oak", "on loud-elm"]),
        ({"id": "bb"}, ["on quiet-oak (3f9a12c07be4)", "on quiet-oak (bb)"]),
        ({}, ["on quiet-oak (3f9a12c07be4)", "on quiet-oak (3f9a12c07be4, wire)"]),
    ],
)
def test_machines_share_no_setting_and_are_named(other: dict[str, Any], ends: list[str]) -> None:
    there = later(run(failed=False), "there", **other)
    evidence = gather(run(failed=False), there if other else over_network(there, "wire"))
    assert len(evidence.cases) == 2 * len(CASES)
    assert [label.removeprefix(", ") for label in labels(evidence)] == ends
    assert len(evidence.trainings) == 2
    assert {case.full_label for case in evidence.cases} >= {f"ddp, 2 ranks, {end}" for end in ends}


def test_a_batch_per_rank_and_a_global_one_share_no_setting() -> None:
    """The same spec in two suites, one of which compares world sizes at the batch of a rank."""
    fixed = with_suite(later(run(CASES[1:2], failed=False), "fixed"), name="weak", **PER_RANK)
    evidence = gather(run(failed=False), fixed)
    by_setting = {setting.label: set(setting.strategies) for setting in evidence.settings}
    assert by_setting[GLOBAL] >= {"ddp", "fsdp2", "refshard-yafsdp"}
    assert by_setting["llama-mini, 4 sequences of 256 tokens per rank"] == {"ddp"}
    names = [case.full_label for case in evidence.cases if case.strategy == "ddp"]
    assert names == ["ddp, 2 ranks, of quickstart", "ddp, 2 ranks, of weak"]


def test_world_sizes_share_a_setting_at_their_kind_of_batch() -> None:
    (setting,) = gather(with_spec(run(), {"ddp": 4})).settings
    assert (setting.label, setting.world_sizes) == (GLOBAL, (1, 2, 4))
    made = with_suite(with_spec(run(failed=False), {"ddp": 4}, global_batch=16), **PER_RANK)
    (setting,) = gather(made).ranked
    assert (setting.label, setting.world_sizes) == ("llama-mini, 4 sequences of 256 tokens per rank", (2, 4))
    assert {s.strategies for s in gather(made).settings} - {setting.strategies} == {("single",)}
    (alone,) = gather(run(CASES[:1], failed=False)).ranked
    assert alone.strategies == ("single",)
    empty = gather(msgspec.structs.replace(run(), launches=()))
    assert (empty.cases, empty.settings, empty.ranked, empty.trainings) == ((), (), (), ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": "inference"}, "inference"),
        ({"microbatches": 2}, "2 microbatches"),
        ({"checkpointing": "every-2"}, "checkpointing every-2"),
        ({"checkpointing": (0, 2)}, "checkpointing of layers 0+2"),
    ],
)
def test_axes_share_no_setting_and_every_heading_names_them(changes: dict[str, Any], words: str) -> None:
    there = with_spec(ONE, **changes)
    plain, other = gather(joined(ONE, there)).settings
    assert (plain.label, other.label) == (GLOBAL, f"{GLOBAL}, {words}")
    assert plain.strategies == other.strategies
    assert {case.label for case in other.cases} == {f"{case.label}, {words}" for case in plain.cases}
    assert labels(gather(there)) == [f", {words}"], "named even if the whole run shares it"
    assert [case.name for case in other.cases] == [case.spec.name for case in other.cases]


def test_another_field_is_named_with_the_case() -> None:
    evidence = gather(with_spec(ONE, {"ddp": 2}, seed=7))
    assert [case.label for case in evidence.cases][:2] == ["single, 1 rank, seed 0", "fsdp2, 2 ranks, seed 0"]
    assert labels(evidence) == [", seed 0", ", seed 7"]


def test_fidelities_clusters_and_resident_ranks_share_no_setting() -> None:
    assert labels(gather(both("simulated"))) == [", measured", ", simulated on dgx-h100"]
    made = run(rounds=1, failed=False, fidelity="emulated")
    ranks = dict.fromkeys(STRATEGIES[1:], 2)
    found = joined(made, with_spec(made, ranks, cluster="lab"), with_spec(made, ranks, resident_ranks=2))
    assert labels(gather(found)) == [
        ", emulated on dgx-h100", ", emulated on dgx-h100, 2 ranks resident", ", emulated on lab",
    ]  # fmt: skip


def test_measured_cases_with_equal_references_train_the_same_however_they_recompute() -> None:
    made = joined(with_spec(ONE, {"ddp": 4, "fsdp2": 2}, checkpointing="full", microbatches=2), both("emulated"))
    (training,) = gather(made).trainings
    assert training.label == f"{GLOBAL}, measured"
    assert "ddp, 4 ranks, 2 microbatches, checkpointing full" in [case.label for case in training.cases]
    assert gather(run(fidelity="emulated", failed=False)).trainings == ()
    inference = with_spec(ONE, workload="inference")
    assert [t.label.rpartition(", ")[2] for t in gather(inference).trainings] == ["inference"]


def test_labels_of_cases_of_several_models_and_batches_are_unique() -> None:
    tiny = with_spec(ONE, {"ddp": 2, "fsdp2": 2}, model="llama-tiny", measured_steps=3)
    large = with_spec(ONE, {"ddp": 2}, global_batch=16)
    found = msgspec.structs.replace(ONE, launches=(*ONE.launches, *tiny.launches[1:3], large.launches[1]))
    assert {case.full_label for case in gather(found).cases} == {
        "single, 1 rank",
        *(f"ddp, 2 ranks, llama-mini, batch of {batch} x 256 tokens" for batch in (8, 16)),
        "ddp, 2 ranks, llama-tiny, batch of 8 x 256 tokens",
        *(f"fsdp2, 2 ranks, {model}" for model in ("llama-mini", "llama-tiny")),
        "refshard-fsdp, 2 ranks",
        "refshard-yafsdp, 2 ranks",
    }
