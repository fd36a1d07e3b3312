"""Launches joined into cases, and cases sorted into settings."""

import msgspec
import pytest

from refshard.analysis.cases import BREAKDOWN
from refshard.analysis.evidence import gather
from refshard.plain import plain
from refshard.records import LaunchRecord, Run, StepTrace
from refshard.specs.case import Fidelity
from tests.report.runs import CASES, FAILED, STRATEGIES, both, run, spec, with_record


def with_spec(made: Run, strategies: dict[str, int], **changes: object) -> Run:
    """The run with the specs of some cases changed; a global batch may not be given, others may."""
    records = []
    for record in made.launches:
        if record.case.job.strategy in strategies:
            case = record.case.changed(gpus=strategies[record.case.job.strategy], **changes)
            record = msgspec.structs.replace(record, case=case, spec_hash=case.hash)
        records.append(record)
    return msgspec.structs.replace(made, launches=tuple(records))


def test_one_case_per_spec_in_the_order_of_the_suite() -> None:
    assert [case.strategy for case in gather(run()).cases] == list(STRATEGIES)


def test_a_case_is_ok_only_if_every_launch_is() -> None:
    states = {case.strategy: case.state for case in gather(run()).cases}
    assert states == {**dict.fromkeys(STRATEGIES, "ok"), FAILED: "failed"}


def test_the_worst_state_counts_whatever_the_order() -> None:
    made = with_record(run(failed=False), 0, state="timeout", error="too slow")
    made = with_record(made, len(CASES), state="oom", error="too large")
    worst = gather(made).cases[0]
    assert (worst.state, worst.error) == ("timeout", "too slow")


def test_step_time_is_the_median_of_launches_and_the_slowest_rank_counts() -> None:
    yafsdp = gather(run()).cases[-1]
    assert yafsdp.metrics["step_time_s"] == pytest.approx(0.0400, rel=1e-4)
    assert yafsdp.step_time is not None
    assert (yafsdp.step_time.n, yafsdp.step_time.launches) == (60, 3)


def test_other_metrics_are_medians_over_the_rounds_that_ended_ok() -> None:
    made = run(rounds=3, failed=False)
    for round_, peak in enumerate((100.0, 900.0, 200.0)):
        place = round_ * len(CASES)
        metrics = {**made.launches[place].metrics, "peak_memory_bytes": peak}
        made = with_record(made, place, metrics=metrics)
    assert gather(made).cases[0].metrics["peak_memory_bytes"] == 200.0
    made = with_record(made, 0, state="failed")
    assert gather(made).cases[0].metrics["peak_memory_bytes"] == 550.0


def test_a_repeated_launch_replaces_the_earlier_one() -> None:
    made = run(failed=False)
    repeated = msgspec.structs.replace(made.launches[1], state="oom")
    case = gather(msgspec.structs.replace(made, launches=(*made.launches, repeated))).cases[1]
    assert [launch.state for launch in case.launches] == ["oom", "ok", "ok"]


def test_parts_of_a_traced_step_add_up_to_it() -> None:
    ddp = gather(run()).cases[1]
    assert ddp.breakdown == pytest.approx(dict(zip(BREAKDOWN, (0.029, 0.011, 0.009, 0.002))))
    assert ddp.exposed_share == pytest.approx(0.009 / 0.051)


def test_a_row_of_traced_figures_adds_up_over_rounds() -> None:
    """Medians of each would not: they come from different rounds, and could give negative compute alone."""
    made = run(rounds=3, failed=False)
    for round_, (compute, comm) in enumerate(((1.0, 0.9), (9.0, 8.9), (9.1, 0.1))):
        place = round_ * len(CASES) + 1
        changed = {"compute_s": compute, "comm_s": comm, "exposed_comm_s": comm / 2, "idle_s": 0.5}
        made = with_record(made, place, metrics={**made.launches[place].metrics, **changed})
    case = gather(made).cases[1]
    parts = case.breakdown
    assert parts is not None
    assert sum(parts.values()) == pytest.approx((1.45 + 13.45 + 9.15) / 3 + 0.5)
    assert case.metrics["overlap_ratio"] == pytest.approx(0.5)
    assert parts["exposed communication"] == case.metrics["exposed_comm_s"] == pytest.approx((0.9 + 8.9 + 0.1) / 6)


@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_rates_and_the_step_time_of_a_row_add_up(rounds: int) -> None:
    """The median of rates is not the rate of the median, of an even number of rounds."""
    made = run(rounds=rounds, failed=False)
    for round_ in range(rounds):
        place, time = round_ * len(CASES) + 1, (1.0, 3.0, 2.0, 7.0)[round_]
        rates = {"step_time_s": time, "tokens_per_s_gpu": 1024 / time, "tflops": 0.002 / time, "mfu": 0.016 / time}
        metrics = {**made.launches[place].metrics, **rates}
        made = with_record(made, place, step_times_s=((time,),) * 2, metrics=metrics)
    metrics = gather(made).cases[1].metrics
    assert metrics["step_time_s"] == {2: 2.0, 3: 2.0, 4: 2.5}[rounds]
    for name, work in (("tokens_per_s_gpu", 1024), ("tflops", 0.002), ("mfu", 0.016)):
        assert (metrics[name] or 0) * (metrics["step_time_s"] or 0) == pytest.approx(work)


def test_traced_figures_have_the_range_of_their_steps() -> None:
    """Two ranks and two steps a launch, of which the ranks' mean counts."""
    made = run(CASES[1:2], rounds=2, failed=False)
    for place, exposed in enumerate(((2, 4), (6, 10))):
        steps = tuple(
            StepTrace(rank=r, step=s, span_ns=0, compute_ns=7, comm_ns=20, exposed_ns=ns + r, idle_ns=0)
            for s, ns in enumerate(exposed)
            for r in range(2)
        )
        made = with_record(made, place, steps=steps)
    found = gather(made).cases[0].traced_range
    assert found["exposed_comm_s"] == pytest.approx((2.5e-9, 10.5e-9))
    assert found["overlap_ratio"] == pytest.approx((1 - 10.5 / 20, 1 - 2.5 / 20))
    one = with_record(run(CASES[1:2], rounds=1, failed=False), 0, steps=made.launches[0].steps[:2])
    assert gather(one).cases[0].traced_range == {}


def test_a_case_without_traces_has_no_parts() -> None:
    made = run(rounds=1, failed=False)
    bare = {**made.launches[1].metrics, "comm_s": None}
    case = gather(with_record(made, 1, metrics=bare)).cases[1]
    assert case.breakdown is None
    assert case.exposed_share is None


def test_world_sizes_of_one_batch_share_a_setting() -> None:
    (setting,) = gather(with_spec(run(), {"ddp": 4})).settings
    assert setting.label == "llama-mini, global batch of 8 sequences of 256 tokens"
    assert setting.world_sizes == (1, 2, 4)


def test_a_batch_per_rank_is_compared_across_world_sizes() -> None:
    made = with_spec(run(failed=False), {"ddp": 4}, global_batch=16)
    suite = msgspec.structs.replace(made.header.suite, case={"model": "llama-mini", "batch_per_rank": 4})
    made = msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, suite=suite))
    (setting,) = gather(made).ranked
    assert setting.label == "llama-mini, 4 sequences of 256 tokens per rank"
    assert setting.world_sizes == (2, 4)
    assert {s.strategies for s in gather(made).settings} - {setting.strategies} == {("single",)}


def test_a_run_of_references_alone_is_its_own_setting() -> None:
    assert [s.strategies for s in gather(run(CASES[:1], failed=False)).ranked] == [("single",)]


def test_what_varies_besides_the_usual_is_named() -> None:
    made = with_spec(run(rounds=1, failed=False), {"ddp": 2}, seed=7)
    assert [case.label for case in gather(made).cases][:3] == [
        "single, 1 rank, seed 0", "fsdp2, 2 ranks, seed 0", "refshard-fsdp, 2 ranks, seed 0",
    ]  # fmt: skip
    assert [s.label for s in gather(made).settings] == [
        "llama-mini, global batch of 8 sequences of 256 tokens, seed 0",
        "llama-mini, global batch of 8 sequences of 256 tokens, seed 7",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": "inference"}, "inference"),
        ({"microbatches": 2}, "2 microbatches"),
        ({"checkpointing": "every-2"}, "checkpointing every-2"),
        ({"checkpointing": (0, 2)}, "checkpointing of layers 0+2"),
    ],
)
def test_axes_never_share_a_setting_and_every_heading_names_them(changes: dict[str, object], words: str) -> None:
    here = run(rounds=1, failed=False)
    there = with_spec(here, dict.fromkeys(STRATEGIES[1:], 2) | {"single": 1}, **changes)
    both = msgspec.structs.replace(here, launches=(*here.launches, *there.launches))
    plain, other = gather(both).settings
    assert plain.label == "llama-mini, global batch of 8 sequences of 256 tokens"
    assert other.label == f"{plain.label}, {words}"
    assert plain.strategies == other.strategies
    assert {case.label for case in other.cases} == {f"{case.label}, {words}" for case in plain.cases}
    assert [s.label for s in gather(there).settings] == [other.label], "named even where the whole run shares it"
    assert [case.name for case in other.cases] == [case.spec.name for case in other.cases]


def test_losses_of_one_training_are_drawn_together_whatever_is_recomputed() -> None:
    here = run(rounds=1, failed=False)
    there = with_spec(here, {"ddp": 2, "fsdp2": 2}, checkpointing="full", microbatches=2)
    (training,) = gather(there).trainings
    assert training.label == "llama-mini, global batch of 8 sequences of 256 tokens"
    assert [c.label for c in training.cases if c.strategy == "ddp"] == [
        "ddp, 2 ranks, 2 microbatches, checkpointing full"
    ]
    inference = with_spec(here, dict.fromkeys(STRATEGIES[1:], 2) | {"single": 1}, workload="inference")
    assert [t.label.rpartition(", ")[2] for t in gather(inference).trainings] == ["inference"]


def test_cases_of_several_models_and_batches_are_told_apart_where_all_of_a_run_meet() -> None:
    here = run(rounds=1, failed=False)
    there = with_spec(here, {"ddp": 2, "fsdp2": 2}, model="llama-tiny", measured_steps=3)
    large = with_spec(here, {"ddp": 2}, global_batch=16)
    found = msgspec.structs.replace(here, launches=(*here.launches, *there.launches[1:3], large.launches[1]))
    assert {c.full_label for c in gather(found).cases} == {
        "single, 1 rank",
        "ddp, 2 ranks, llama-mini, batch of 8 x 256 tokens",
        "ddp, 2 ranks, llama-mini, batch of 16 x 256 tokens",
        "ddp, 2 ranks, llama-tiny, batch of 8 x 256 tokens",
        "fsdp2, 2 ranks, llama-mini",
        "fsdp2, 2 ranks, llama-tiny",
        "refshard-fsdp, 2 ranks",
        "refshard-yafsdp, 2 ranks",
    }


@pytest.mark.parametrize("fidelity", ["simulated", "emulated"])
def test_fidelities_never_share_a_setting(fidelity: Fidelity) -> None:
    labels = [setting.label for setting in gather(both(fidelity)).settings]
    assert [label.rpartition(", ")[2] for label in labels] == ["measured", f"{fidelity} on dgx-h100"]
    assert all(label.count("emulated") <= 1 for label in labels)


def test_clusters_and_numbers_of_resident_ranks_never_share_a_setting() -> None:
    made = run(rounds=1, failed=False, fidelity="emulated")
    elsewhere = [
        msgspec.structs.replace(record, case=record.case.changed(**changes))
        for changes in ({"cluster": "lab"}, {"resident_ranks": 2})
        for record in made.launches
        if record.case.job.gpus > 1
    ]
    found = gather(msgspec.structs.replace(made, launches=(*made.launches, *elsewhere))).settings
    assert [setting.label.partition("tokens")[2] for setting in found] == [
        ", emulated on dgx-h100", ", emulated on dgx-h100, 2 ranks resident", ", emulated on lab",
    ]  # fmt: skip


def test_only_what_was_measured_is_said_to_train_the_same() -> None:
    assert [training.label for training in gather(both("emulated")).trainings] == [
        "llama-mini, global batch of 8 sequences of 256 tokens, measured"
    ]
    assert gather(run(fidelity="emulated", failed=False)).trainings == ()


def test_cases_with_equal_references_train_the_same() -> None:
    made = with_spec(run(rounds=1, failed=False), {"ddp": 4, "fsdp2": 8})
    (training,) = gather(made).trainings
    assert len(training.cases) == len(CASES)


def test_a_run_without_cases_has_no_settings() -> None:
    empty = msgspec.structs.replace(run(), launches=())
    assert not gather(empty).cases
    assert not gather(empty).settings
    assert not gather(empty).ranked


def test_plain_text_keeps_lines_and_drops_what_terminals_obey() -> None:
    assert plain("\x1b[31mred\x1b[0m\tend\nnext\x07\x1b]0;title") == "red    end\nnext\ufffd\ufffd]0;title"


def test_errors_are_plain() -> None:
    made = with_record(run(), -1, error="\x1b[1mbold\x1b[0m")
    assert {case.error for case in gather(made).cases} == {None, "bold"}


def test_names_are_those_of_the_spec() -> None:
    assert gather(run()).cases[1].name == spec("ddp").name == "ddp-w2-llama-mini-b8x256"


def test_launches_are_records_in_the_order_of_rounds() -> None:
    made = run(failed=False)
    backwards = msgspec.structs.replace(made, launches=tuple(reversed(made.launches)))
    launches: tuple[LaunchRecord, ...] = gather(backwards).cases[0].launches
    assert [launch.round for launch in launches] == [0, 1, 2]
