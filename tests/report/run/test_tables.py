"""Tables and plain values, against the numbers that the run was made of."""

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refshard.analysis.cases import BREAKDOWN
from refshard.analysis.evidence import Evidence, Setting, gather
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.proof import bit_identical, proof_summary
from refshard.analysis.rankings import rankings
from refshard.analysis.sample import Summary
from refshard.quantities import GIB, MIB
from refshard.records import METRICS, CollectiveCount, GpuMemory, Run
from refshard.report.blocks import Marked, Section, Table, Text
from refshard.report.run import cells, charts
from refshard.report.run import rows as flat
from refshard.report.run.answer import run_answer
from refshard.report.run.charts import device_limit, tip, tradeoff
from refshard.report.run.page import page
from refshard.report.run.rows import as_json
from refshard.report.run.tables import Headline, case_table, failures, gpu_memory_table, headline, proof_table, states
from tests.report import printed
from tests.report.printed import rows, tables, text, verdict
from tests.report.runs import CASES, FAILED, HOSTILE, STRATEGIES, both, proof, run, with_record

KEYS = {
    "case", "spec_hash", "environment", "strategy", "gpus", "model", "global_batch", "seq_len", "workload",
    "microbatches", "checkpointing", "precision", "tuning", "optimizer", "offload", "dp_replicate", "tp",
    "sequence_parallel", "cp", "pp", "interleave", "schedule", "ep", "comm_memory",
    "peak_requested_bytes", "gpu_used_bytes", "gpu_outside_bytes", "gpu_total_bytes", "allocation_retries",
    "memory_limit_gib", "compile_s", "host_waits", "probe_drift", "other_cores",
    "fidelity", "device", "backend", "state", "rounds", "samples",
    *METRICS, "step_time_low_s", "step_time_high_s", "flops_convention", "recompute", "peak_flops_per_s", "peak_source",
    "proof", "collectives_note", "bit_identical_to_ddp", "bits_note", "parity_note",
    "cluster", "warnings", "error", "network",
}  # fmt: skip


def summary(median: float, low: float, high: float) -> Summary:
    return Summary(median=median, low=low, high=high, n=9, launches=3)


def test_json_has_an_object_per_case_with_flat_keys() -> None:
    found = flat.as_json(gather(run()))
    assert [row["strategy"] for row in found] == list(STRATEGIES)
    assert all(row.keys() == KEYS for row in found)


def test_json_values_are_those_of_the_run() -> None:
    fsdp2 = flat.as_json(gather(run()))[2]
    assert fsdp2["case"] == "fsdp2-w2-llama-mini-b8x256"
    assert (fsdp2["state"], fsdp2["rounds"], fsdp2["samples"], fsdp2["gpus"]) == ("ok", 3, 60, 2)
    assert fsdp2["step_time_s"] == pytest.approx(0.060, rel=1e-4)
    assert fsdp2["step_time_low_s"] < fsdp2["step_time_s"] < fsdp2["step_time_high_s"]
    assert fsdp2["peak_memory_bytes"] == 300 * MIB
    assert fsdp2["exposed_comm_s"] == pytest.approx(0.016)
    assert (fsdp2["proof"], fsdp2["bit_identical_to_ddp"]) == ("proved", False)
    assert fsdp2["bits_note"] == "reduces in another order"
    assert fsdp2["error"] is None


def test_what_does_not_exist_is_null_in_json() -> None:
    single, *_ = flat.as_json(gather(run()))
    assert single["overlap_ratio"] is None
    assert single["bit_identical_to_ddp"] is None
    bare = with_record(run(CASES[:1], rounds=1, failed=False), 0, step_times_s=((0.5,),))
    (row,) = flat.as_json(gather(bare))
    assert (row["step_time_s"], row["step_time_low_s"], row["step_time_high_s"]) == (0.5, None, None)


def test_json_is_safe_even_for_numbers_that_json_lacks() -> None:
    made = run()
    broken = {**made.launches[1].metrics, "mfu": math.nan, "tflops": math.inf}
    text = json.dumps(flat.as_json(gather(with_record(made, 1, metrics=broken))), allow_nan=False)
    assert len(json.loads(text)) == 6


def test_a_failed_case_keeps_its_error_and_the_figures_of_the_round_that_ended_ok() -> None:
    tuned = flat.as_json(gather(run()))[3]
    assert (tuned["strategy"], tuned["state"], tuned["rounds"], tuned["samples"]) == (FAILED, "failed", 3, 40)
    assert tuned["error"] == f"RuntimeError: mat1 and mat2 shapes differ {HOSTILE}\nsecond line"
    assert tuned["proof"] == "incomplete"


def test_rows_are_the_json_as_a_table() -> None:
    table = flat.rows(gather(run()))
    assert table.shape == (6, len(KEYS))
    assert table.loc[table["strategy"] == "ddp", "peak_memory_bytes"].item() == 440 * MIB


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "proved"),
        ({"loss_parity": None}, "losses not checked"),
        ({"collectives_note": "no sizes"}, "collectives not checked"),
        ({"loss_parity": None, "collectives_note": "no sizes"}, "collectives and losses not checked"),
        ({"failures": ("the model was not wrapped",)}, "failed: the model was not wrapped"),
    ],
)
def test_proof_in_a_word(changes: dict[str, object], expected: str) -> None:
    made = run(CASES[:1], rounds=1, failed=False)
    changed = msgspec.structs.replace(proof(CASES[0]), **changes)
    assert proof_summary(gather(with_record(made, 0, proof=changed)).cases[0]) == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [((True, True), True), ((True, False), False), ((None, False), False), ((None, True), None)],
)
def test_bits_are_identical_only_if_every_round_says_so(
    rounds: tuple[bool | None, bool | None], expected: bool | None
) -> None:
    made = run(CASES[1:2], failed=False)
    for place, answer in enumerate(rounds):
        changed = msgspec.structs.replace(proof(CASES[1]), bit_identical_to_ddp=answer)
        made = with_record(made, place, proof=changed)
    assert bit_identical(gather(made).cases[0]) is expected


def test_a_case_without_communication_exposes_nothing_to_speak_of() -> None:
    texts = {case.strategy: cells.exposed(case) for case in gather(run()).cases}
    assert (texts["single"], texts["refshard-yafsdp"]) == (None, "1.00 ms (2.4 %)")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (summary(0.0412, 0.0408, 0.0419), "41.2 ms (40.8 to 41.9)"),
        (summary(0.9, 0.7, 1.2), "900 ms (700 ms to 1.20 s)"),
        (Summary(median=0.9, low=0.0, high=math.inf, n=20, launches=1), "900 ms (n = 1: no interval)"),
    ],
)
def test_step_time_with_its_interval(given: Summary, text: str) -> None:
    assert cells.with_interval(given).replace("\n", " ") == text


def test_breakdown_adds_up_to_the_traced_step() -> None:
    found = {case.strategy: case.breakdown for case in gather(run()).cases if case.ok}
    assert found["fsdp2"] == pytest.approx(dict(zip(BREAKDOWN, (0.028, 0.014, 0.016, 0.004))))
    assert FAILED not in found


def test_losses_of_different_lengths_leave_dashes() -> None:
    made = with_record(run(failed=False), 1, losses=(6.5,))
    drawn = charts.losses(gather(made).trainings[0], "t")
    assert drawn is not None
    assert [(row["step"], row["ddp, 2 ranks"]) for row in rows(drawn.table)][:2] == [("1", "6.5"), ("2", "-")]
    assert [column.case for column in drawn.table.columns] == [None, *range(5)], "a filter hides columns of cases"


def test_proof_table_shows_a_trace_that_differs() -> None:
    made = run(CASES[1:2], rounds=1, failed=False)
    traced = (CollectiveCount(op="all_reduce", count=3, bytes=24 * MIB),)
    changed = msgspec.structs.replace(proof(CASES[1]), traced=traced)
    (row,) = rows(proof_table(gather(with_record(made, 0, proof=changed))))
    assert row["collectives traced"] == "3 all_reduce (24.0 MiB)"


def test_the_note_on_collectives_is_in_the_proof_table_and_the_rows() -> None:
    made = run(CASES[1:2], rounds=1, failed=False)
    changed = msgspec.structs.replace(proof(CASES[1]), traced=(), collectives_note="not checked, because of no sizes")
    evidence = gather(with_record(made, 0, proof=changed))
    assert rows(proof_table(evidence))[0]["collectives traced"] == "not checked, because of no sizes"
    assert flat.as_json(evidence)[0]["collectives_note"] == "not checked, because of no sizes"


def test_state_table_has_a_row_per_launch_with_its_log() -> None:
    table, log = states(gather(run())).blocks
    assert isinstance(table, Table)
    assert len(table.rows) == 18
    (failed,) = [row for row in rows(table) if row["state"] == "failed"]
    assert (failed["case"], failed["round"], failed["duration"]) == ("fsdp2-tuned, 2 ranks", "3", "3.25 s")
    assert isinstance(log, Section)
    assert isinstance(log.blocks[0], Text)
    assert log.title == "Log of fsdp2-tuned, 2 ranks, round 3 (failed)"
    assert log.blocks[0].text.splitlines()[1] == f"rank 1: {HOSTILE}"


def test_the_table_shows_every_case_with_the_most_important_columns_first() -> None:
    found = run_answer(gather(run()))
    (table,) = tables(found)
    assert table.title == "llama-mini, global batch of 8 sequences of 256 tokens"
    assert [row["strategy"] for row in rows(table)] == list(STRATEGIES)
    (fsdp2,) = (row for row in rows(table) if row["strategy"] == "fsdp2")
    assert list(fsdp2.items())[:5] == [
        ("strategy", "fsdp2"), ("ranks", "2"), ("state", "ok"), ("step time (95 % interval)", "60.0 ms (58.2 to 61.9)"),
        ("peak memory", "300 MiB"),
    ]  # fmt: skip
    assert {"17,067", "16.0 ms (25.8 %)", "46.7 %", "3.1e-07"} <= set(fsdp2.values())
    assert max(len(line) for line in text(found).splitlines()) <= 140
    lines = text(found).splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith("fsdp2 "))
    assert lines[place + 1].strip() == "(58.2 to 61.9)", "the interval stands under the step time"


def test_states_that_are_not_ok_are_marked() -> None:
    (table,) = tables(run_answer(gather(run())))
    states = {row[0]: row[2] for row in table.rows}
    assert (states["ddp"], states[FAILED]) == ("ok", Marked("failed", "bad"))


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_the_table_and_the_sentences_fit_the_terminal(width: int) -> None:
    shown = text(run_answer(gather(run())), width, verbose=True)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert ("not shown in 80 columns" in shown) == (width == 80)


def test_inference_and_training_meet_in_no_table_and_no_sentence() -> None:
    made = run(failed=False)
    slower = [replace(case, step_time=2 * case.step_time) for case in CASES]
    inference = tuple(
        msgspec.structs.replace(r, case=r.case.changed(workload="inference"))
        for r in run(slower, failed=False).launches
    )
    both = run_answer(gather(msgspec.structs.replace(made, launches=(*made.launches, *inference))))
    label = "llama-mini, global batch of 8 sequences of 256 tokens"
    training, inferring = tables(both)
    assert (training.title, inferring.title) == (label, f"{label}, inference")
    times = [" ".join(row["step time (95 % interval)"] for row in rows(table)) for table in (training, inferring)]
    assert ["40.0 ms" in told for told in times] == [True, False]
    assert ["120 ms" in told for told in times] == [False, True]
    assert rows(tables(run_answer(gather(made)))[0]) == rows(training)
    told = verdict(both)
    assert told[0].startswith(f"{label}, 2 ranks: refshard-yafsdp is fastest at 40.0 ms per step.")
    assert told[1].startswith(f"{label}, inference, 2 ranks: refshard-yafsdp is fastest at 80.0 ms per step.")


def test_the_verdict_and_notes_wrap_and_obey_no_log() -> None:
    shown = text(run_answer(gather(with_record(run(), -1, error="\x1b[2J\x07boom " + 40 * "word "))))
    sentences = shown[shown.index("* fsdp2-tuned") :]
    assert max(len(line) for line in sentences.splitlines()) <= 120
    assert "\nrefshard-yafsdp is fastest at 40.0 ms per step. " in sentences
    assert "\x1b" not in shown
    assert "\x07" not in shown


def empty(made: Run) -> Run:
    return msgspec.structs.replace(made, launches=(), end=None)


def test_a_run_cut_off_before_its_first_case_has_empty_views() -> None:
    made = empty(run())
    assert flat.as_json(gather(made)) == []
    assert flat.rows(gather(made)).empty
    assert proof_table(gather(made)).rows == []
    assert tables(run_answer(gather(made))) == []
    assert text(run_answer(gather(made))).startswith("Not finished: 0 of 18 launches are done; the run was cut off")


def heads(setting: Setting) -> list[str]:
    return [column.head for column in case_table(setting.cases, title="").columns]


def test_no_table_shows_the_losses_of_what_is_emulated() -> None:
    emulated = run(rounds=1, failed=False, fidelity="emulated")
    (setting,) = gather(emulated).settings
    assert "loss parity" not in heads(setting)
    assert {row["loss parity"] for row in rows(proof_table(gather(emulated)))} == {"compares with nothing"}
    assert {(row["loss_parity"], row["parity_note"], row["cluster"]) for row in flat.as_json(gather(emulated))} == {
        (None, "compares with nothing", "dgx-h100")
    }
    for setting in gather(both("emulated")).settings:
        assert ("loss parity" in heads(setting)) == ("measured" in setting.label)


def of(evidence: Evidence) -> Headline:
    (ranking,) = rankings(evidence)
    return headline(ranking, ranking.setting)


def test_the_fastest_comes_first_then_what_failed_then_references() -> None:
    table = rows(of(gather(run())).table)
    assert [row["strategy"] for row in table] == [
        "refshard-yafsdp", "refshard-fsdp", "ddp", "fsdp2", "fsdp2-tuned", "single, 1 rank",
    ]  # fmt: skip
    assert [row["vs"] for row in table] == [
        "1",
        "1.20 (1.20 to 1.20)",
        "1.25 (1.25 to 1.25)",
        "1.50 (1.50 to 1.50)",
        "-",
        "-",
    ]
    assert table[4]["step time (95 % interval)"] == "failed"


def test_calculated_times_have_ratios_without_intervals() -> None:
    found = of(gather(run(CASES[1:3], rounds=1, failed=False, fidelity="dryrun")))
    assert [(row["step time"], row["vs"]) for row in rows(found.table)] == [("50.0 ms", "1"), ("60.0 ms", "1.20")]


def test_a_case_that_does_not_fit_shows_what_it_needs() -> None:
    made = run(CASES[1:], rounds=1, failed=False)
    made = with_record(made, 0, state="oom", error="out of memory", metrics={"peak_memory_bytes": 2.0**30})
    found = of(gather(made))
    (row,) = [row for row in rows(found.table) if row["strategy"] == "ddp"]
    assert (row["step time (95 % interval)"], row["peak memory"]) == ("out of memory", "needs 1.00 GiB")
    assert [line.text for line in failures(found.cases)] == ["Out of memory: ddp (out of memory)."]


def test_pointing_tells_what_the_label_does_not() -> None:
    case = gather(run()).cases[1]
    lines = tip(case, "peak_memory_bytes").split("<br>")
    assert lines[0] == "<b>ddp</b>, 2 ranks, measured"
    assert lines[1].startswith("step time 50.0 ms, 95 % interval 4")
    assert lines[1].endswith("(3 rounds, 60 steps)")
    assert lines[2] == "peak memory 440 MiB"
    few = gather(run(rounds=1, failed=False)).cases[1]
    assert "step time 50.0 ms, no interval (1 round, 20 steps)" in tip(few, "peak_memory_bytes")


def test_names_cannot_smuggle_markup_into_a_tip() -> None:
    made = run([replace(CASES[1], strategy='<a href="x">')], rounds=1, failed=False)
    assert "<a" not in tip(gather(made).cases[0], "peak_memory_bytes")


def test_the_chart_in_words() -> None:
    (ranking,) = rankings(gather(run()))
    drawn = tradeoff(ranking, None, "t")
    assert drawn is not None
    assert drawn.alternative == ("Lower left is better. Dotted, the Pareto front: refshard-yafsdp (40.0 ms, 240 MiB).")
    (ranking,) = rankings(gather(run(rounds=1, failed=False, fidelity="dryrun")))
    limit = device_limit(ranking.cases)
    assert limit is not None
    assert limit.text == "77.9 GiB usable"
    drawn = tradeoff(ranking, limit, "t")
    assert drawn is not None
    assert drawn.alternative.endswith(" The limit, 77.9 GiB usable, lies outside the chart.")


def test_a_cpu_has_no_limit() -> None:
    assert device_limit(gather(run()).cases) is None


RESERVED = 71.2


def memory(reserved_gib: float, **changes: Any) -> GpuMemory:
    fields = {
        "allocated_bytes": 60 * GIB, "active_bytes": 61 * GIB, "reserved_bytes": int(reserved_gib * GIB),
        "requested_bytes": 59 * GIB, "retries": 0, "ooms": 0, "used_bytes": int((reserved_gib + 2) * GIB),
        "outside_bytes": 2 * GIB, "total_bytes": int(79.2 * GIB),
    }  # fmt: skip
    return GpuMemory(**{**fields, **changes})


def on_gpus(made: Run, ranks: tuple[GpuMemory, ...]) -> Run:
    """The run, had all its cases run on GPUs with this memory."""
    for place, record in enumerate(made.launches):
        metrics = {**record.metrics, "peak_reserved_bytes": float(max(one.reserved_bytes for one in ranks))}
        made = with_record(made, place, gpu_memory=ranks, metrics=metrics)
    return made


@pytest.fixture
def evidence() -> Evidence:
    return gather(on_gpus(run(CASES, rounds=3, failed=False), (memory(30.0), memory(RESERVED, retries=2))))


def test_a_gpus_memory_is_what_is_reserved_of_the_device(evidence: Evidence) -> None:
    (shown,) = printed.tables(run_answer(evidence))
    assert {row["peak reserved"] for row in printed.rows(shown)} == {"71.2 of 79.2 GiB"}
    assert "peak memory" not in printed.rows(shown)[0]
    place = [column.head for column in shown.columns].index("peak reserved")
    assert place <= 4, "one of the first columns, which narrow terminals show"
    (ranking,) = rankings(evidence)
    limit = device_limit(ranking.cases)
    assert limit is not None
    assert limit.text == "79.2 GiB on the GPU"
    drawn = tradeoff(ranking, limit, "t")
    assert drawn is not None
    assert "limit: 79.2 GiB on the GPU" in [note["text"] for note in drawn.figure["layout"]["annotations"]]


def test_the_other_kinds_have_a_table_on_the_page(evidence: Evidence) -> None:
    table = gpu_memory_table(evidence.settings[0].cases)
    assert printed.rows(table)[1] == {
        "case": "ddp, 2 ranks", "reserved": "71.2 of 79.2 GiB reserved", "active": "61.0 GiB", "allocated": "60.0 GiB",
        "requested": "59.0 GiB", "used on the device": "73.2 of 79.2 GiB", "outside the allocator": "2.00 GiB",
        "retries": "6",
    }  # fmt: skip
    text = "".join(page(evidence))
    assert "71.2 of 79.2 GiB reserved" in text
    assert "Memory of the fullest GPU" in text


def test_programs_read_it_too(evidence: Evidence) -> None:
    row = as_json(evidence)[1]
    assert row["peak_requested_bytes"] == 59 * GIB
    assert row["gpu_used_bytes"] - row["gpu_outside_bytes"] == pytest.approx(71.2 * GIB, abs=1)
    assert (row["gpu_total_bytes"], row["allocation_retries"]) == (int(79.2 * GIB), 6)


def test_several_launches_have_the_median_of_their_fullest_rank() -> None:
    made = on_gpus(run(CASES[:1], rounds=3, failed=False), (memory(50.0), memory(40.0)))
    made = with_record(made, 1, gpu_memory=(memory(10.0), memory(70.0, total_bytes=70 * GIB)))
    found = gpu_memory_of(gather(made).cases[0])
    assert found is not None
    assert (found.reserved_bytes, found.total_bytes) == (50 * GIB, int(79.2 * GIB))


def test_memory_of_a_case_on_a_cpu_is_shown_as_before() -> None:
    evidence = gather(run(CASES, rounds=1, failed=False))
    table = printed.rows(case_table(evidence.settings[0].cases, title=""))
    assert "440 MiB" in {row["peak memory"] for row in table}
    assert "peak reserved" not in table[0]
    assert gpu_memory_table(evidence.cases).rows == []
    assert "Memory of the fullest GPU" not in "".join(page(evidence))
    assert as_json(evidence)[1]["gpu_total_bytes"] is None


def test_where_one_case_lacks_it_both_columns_stand() -> None:
    """Of runs of an older refshard, shown together with one of this."""
    made = on_gpus(run(CASES, rounds=1, failed=False), (memory(RESERVED),))
    old = made.launches[1]
    made = with_record(made, 1, gpu_memory=(), metrics={**old.metrics, "peak_reserved_bytes": None})
    table = printed.rows(case_table(gather(made).settings[0].cases, title=""))
    assert [row["peak memory"] for row in table][1:3] == ["440 MiB", "300 MiB"]
    assert [row["peak reserved"] for row in table][1:3] == ["-", "71.2 of 79.2 GiB"]
