"""Tables, flat rows and the comparison's ranking; goldens show their cells."""

import json
import math
from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.rankings import rankings
from refshard.quantities import GIB, MIB
from refshard.records import CollectiveCount, Run
from refshard.report.blocks import Marked, Section, Text
from refshard.report.run import cells, charts
from refshard.report.run.answer import as_rows, run_answer
from refshard.report.run.charts import device_limit, scalings, tip, tradeoff
from refshard.report.run.tables import Headline, case_table, failures, headline, proof_table, states
from refshard.report.run.trust import trust
from refshard.report.run.verdict import findings, unranked
from tests.report.printed import rows, tables, text, verdict
from tests.report.runs import (
    CASES,
    CLUSTER,
    FAILED,
    HOSTILE,
    STRATEGIES,
    both,
    gpu_memory,
    joined,
    on_gpus,
    proof,
    run,
    with_record,
    with_spec,
)

ONE = run(CASES[1:2], rounds=1, failed=False)
"""One launch of ddp."""


def test_flat_rows_have_the_same_columns_for_every_run() -> None:
    found = as_rows(gather(run()))
    assert [row["strategy"] for row in found] == list(STRATEGIES)
    assert list(found[0]) == list(run_answer(gather(empty(run()))).columns)


def test_what_json_lacks_or_does_not_exist_is_null() -> None:
    made = with_record(run(), 1, metrics={**run().launches[1].metrics, "mfu": math.nan, "tflops": math.inf})
    assert len(json.loads(json.dumps(as_rows(gather(made)), allow_nan=False))) == 6
    single = as_rows(gather(with_record(run(CASES[:1], rounds=1, failed=False), 0, step_times_s=((0.5,),))))[0]
    assert (single["overlap_ratio"], single["bit_identical_to_ddp"], single["gpu_total_bytes"]) == (None, None, None)
    assert (single["step_time_s"], single["step_time_low_s"], single["step_time_high_s"]) == (0.5, None, None)


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
def test_summary_of_a_proof(changes: dict[str, object], expected: str) -> None:
    changed = msgspec.structs.replace(proof(CASES[1]), **changes)
    assert gather(with_record(ONE, 0, proof=changed)).cases[0].proof_summary == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [((True, True), True), ((True, False), False), ((None, False), False), ((None, True), None)],
)
def test_bits_are_identical_only_if_every_round_says_so(rounds: tuple[bool | None, ...], expected: bool | None) -> None:
    made = run(CASES[1:2], rounds=2, failed=False)
    for place, answer in enumerate(rounds):
        made = with_record(
            made, place, proof=msgspec.structs.replace(proof(CASES[1]), bit_identical_to_ddp=answer)
        )  # fmt: skip
    assert gather(made).cases[0].bit_identical is expected


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ((0.0412,) * 3, "41.2 ms (41.2 to 41.2)"),
        ((0.6, 0.9, 1.2), "900 ms (304 ms to 2.66 s)"),
        ((0.9,), "900 ms (n = 1: no interval)"),
    ],
)
def test_step_time_with_its_interval(times: tuple[float, ...], shown: str) -> None:
    made = run(CASES[1:2], rounds=len(times), failed=False)
    for place, time in enumerate(times):
        made = with_record(made, place, step_times_s=((time,),))
    assert cells.step_time(gather(made).cases[0]).replace("\n", " ") == shown


def test_losses_of_different_lengths_leave_dashes() -> None:
    drawn = charts.losses(gather(with_record(run(failed=False), 1, losses=(6.5,))).trainings[0], "t")
    assert drawn is not None
    assert [(row["step"], row["ddp, 2 ranks"]) for row in rows(drawn.table)][:2] == [("1", "6.5"), ("2", "-")]
    assert [column.case for column in drawn.table.columns] == [None, *range(5)], "a filter hides columns of cases"


@pytest.mark.parametrize(
    ("note", "shown"), [("", "3 all_reduce (24.0 MiB)"), ("not checked: no sizes", "not checked: no sizes")]
)
def test_proof_table_shows_a_trace_that_differs_or_why_it_was_not_checked(note: str, shown: str) -> None:
    traced = (CollectiveCount(op="all_reduce", count=3, bytes=24 * MIB),)
    changed = msgspec.structs.replace(proof(CASES[1]), traced=traced, collectives_note=note)
    (row,) = rows(proof_table(gather(with_record(ONE, 0, proof=changed))))
    assert row["collectives traced"] == shown


def test_every_launch_has_a_state_and_a_log_if_it_left_one() -> None:
    _, log = states(gather(run())).blocks
    assert isinstance(log, Section)
    assert isinstance(log.blocks[0], Text)
    assert log.title == "Log of fsdp2-tuned, 2 ranks, round 3 (failed)"
    assert log.blocks[0].text.splitlines()[1] == f"rank 1: {HOSTILE}"
    (shown,) = tables(run_answer(gather(run())))
    marked = {row[0]: row[2] for row in shown.rows}
    assert (marked["ddp"], marked[FAILED]) == ("ok", Marked("failed", "bad"))


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_the_table_and_the_sentences_fit_the_terminal(width: int) -> None:
    made = with_record(run(), -1, error="\x1b[2J\x07boom " + 40 * "word ")
    shown = text(run_answer(gather(made)), width, verbose=True)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert ("not shown in 80 columns" in shown) == (width == 80)
    assert not {"\x1b", "\x07"} & set(shown)


def test_inference_and_training_share_no_table_and_no_sentence() -> None:
    slower = run([replace(case, step_time=2 * case.step_time) for case in CASES], failed=False)
    found = run_answer(gather(joined(run(failed=False), with_spec(slower, workload="inference"))))
    label = "llama-mini, global batch of 8 sequences of 256 tokens"
    training, inferring = tables(found)
    assert (training.title, inferring.title) == (label, f"{label}, inference")
    assert rows(tables(run_answer(gather(run(failed=False))))[0]) == rows(training)
    assert [sentence.partition(" per step")[0].partition(".0 % longer. ")[::2] for sentence in verdict(found)] == [
        (f"{label}, 2 ranks: Use refshard-yafsdp: 60.0 MiB (20 %) less memory than fsdp2, which takes 50", "40.0 ms"),
        (
            f"{label}, inference, 2 ranks: Use refshard-yafsdp: 60.0 MiB (20 %) less memory than fsdp2, which takes 50",
            "80.0 ms",
        ),
    ]


def empty(made: Run) -> Run:
    return msgspec.structs.replace(made, launches=(), end=None)


def test_a_run_cut_off_before_its_first_case_has_empty_views() -> None:
    evidence = gather(empty(run()))
    assert (as_rows(evidence), proof_table(evidence).rows, tables(run_answer(evidence))) == ([], [], [])
    assert text(run_answer(evidence)).startswith("Not finished: 0 of 18 launches are done; the run was cut off")


def of(evidence: Evidence) -> Headline:
    (ranking,) = rankings(evidence)
    return headline(ranking, ranking.setting)


def test_the_fastest_comes_first_then_what_failed_then_references() -> None:
    table = of(gather(run())).table
    assert [row["strategy"] for row in rows(table)] == [
        "refshard-yafsdp", "refshard-fsdp", "ddp", "fsdp2", "fsdp2-tuned", "single, 1 rank",
    ]  # fmt: skip
    assert [row["vs"].partition(" ")[0] for row in rows(table)] == ["1", "1.20", "1.25", "1.50", "-", "-"]
    assert rows(table)[4]["step time (95 % interval)"] == "failed"
    assert {str(cell) for row in table.rows for cell in row if isinstance(cell, Marked)} == {
        "40.0 ms\n(38.8 to 41.3)", "240 MiB", "25,600", "40.0 %",
    }  # fmt: skip


def test_a_case_that_does_not_fit_shows_what_it_needs() -> None:
    needs = {"peak_memory_bytes": 2.0**30}
    made = run(CASES[1:], rounds=1, failed=False)
    made = with_record(made, 0, state="oom", error="out of memory: x", metrics=needs)
    found = of(gather(made))
    (row,) = [row for row in rows(found.table) if row["strategy"] == "ddp"]
    assert (row["step time (95 % interval)"], row["peak memory"]) == ("out of memory", "needs 1.00 GiB")
    assert [line.text for line in failures(found.cases)] == ["Out of memory: ddp (x)."]


def test_a_tip_has_the_samples_and_no_markup() -> None:
    lines = tip(gather(run()).cases[1], "peak_memory_bytes").split("<br>")
    assert lines[:3] == [
        "<b>ddp</b>, 2 ranks, measured", "step time 50.0 ms (48.5 to 51.6), 3 rounds, 60 steps", "peak memory 440 MiB",
    ]  # fmt: skip
    made = run([replace(CASES[1], strategy='<a href="x">')], rounds=1, failed=False)
    assert "<a" not in tip(gather(made).cases[0], "peak_memory_bytes")


def test_the_limit_of_memory_is_named_if_there_is_one() -> None:
    assert device_limit(gather(run()).cases) is None
    (ranking,) = rankings(gather(run(rounds=1, failed=False, fidelity="dryrun")))
    drawn = tradeoff(ranking, "t", {})
    assert drawn is not None
    assert drawn.alternative.endswith(" The limit, 77.9 GiB usable, lies outside the chart.")
    (ranking,) = rankings(gather(on_gpus(run(CASES, failed=False), gpu_memory(71.2))))
    drawn = tradeoff(ranking, "t", {})
    assert drawn is not None
    assert "limit: 79.2 GiB on the GPU" in [note["text"] for note in drawn.figure["layout"]["annotations"]]


def test_gpu_memory_is_the_median_of_the_fullest_rank() -> None:
    made = on_gpus(run(CASES[:1], rounds=3, failed=False), gpu_memory(50.0, retries=2), gpu_memory(40.0))
    made = with_record(made, 1, gpu_memory=(gpu_memory(10.0), gpu_memory(70.0, total_bytes=70 * GIB)))
    found = gather(made).cases[0].gpu_memory
    assert found is not None
    assert (found.reserved_bytes, found.total_bytes, found.retries) == (50 * GIB, int(79.2 * GIB), 4)
    assert as_rows(gather(made))[0]["gpu_outside_bytes"] == 2 * GIB


def test_both_kinds_of_memory_are_shown_if_one_case_has_no_gpu_memory() -> None:
    made = on_gpus(run(CASES, rounds=1, failed=False), gpu_memory(71.2))
    made = with_record(
        made, 1, gpu_memory=(), metrics={**made.launches[1].metrics, "peak_reserved_bytes": None}
    )  # fmt: skip
    table = rows(case_table(gather(made).settings[0].cases, title=""))
    assert [row["peak memory"] for row in table][1:3] == ["440 MiB", "300 MiB"]
    assert [row["peak reserved"] for row in table][1:3] == ["-", "71.2 of 79.2 GiB"]


# --- dry runs and emulated cases


def dry(*, out_of_memory: str = "") -> Run:
    """One step each, with reserved memory; ``out_of_memory`` names a strategy that does not fit."""
    made = run(CASES, rounds=1, failed=False, fidelity="dryrun")
    for place, record in enumerate(made.launches):
        reserved = {"ddp": 700, "fsdp2": 400, "refshard-fsdp": 410, "refshard-yafsdp": 300}.get(
            record.case.job.strategy
        )
        metrics = {**record.metrics, "peak_reserved_bytes": None if reserved is None else float(reserved * MIB)}
        made = with_record(made, place, metrics=metrics, step_times_s=((record.step_times_s[0][0],),))
        if record.case.job.strategy == out_of_memory:
            needs = {**dict.fromkeys(metrics), "peak_memory_bytes": 900.0 * MIB, "peak_reserved_bytes": 950.0 * MIB}
            made = with_record(made, place, state="oom", error="needs", metrics=needs, step_times_s=())
    return made


def test_calculated_times_have_no_interval_and_memory_is_reserved() -> None:
    evidence = gather(dry())
    facts = {fact.label: fact for fact in trust(evidence)}
    assert (facts["Fidelity"].value, facts["Noise"].value, facts["Noise"].style) == ("dry run", "none", "plain")
    assert "95 %" not in text(run_answer(evidence), verbose=True)
    assert {case.warnings for case in evidence.cases} == {()}
    (finding,) = findings(evidence)
    assert finding.lead.startswith("Use refshard-yafsdp: ")
    assert finding.margin.startswith("39.6 ms per step and 300 MiB per rank (reserved), by dry run. ")
    assert [row["vs"] for row in rows(of(evidence).table)][:2] == ["1", "1.20"]
    assert rows(case_table(evidence.settings[0].cases, title=""))[-1]["peak reserved"] == "300 MiB"


def test_out_of_memory_shows_what_it_needs_and_does_not_compete() -> None:
    evidence = gather(dry(out_of_memory="ddp"))
    (row,) = [row for row in rows(case_table(evidence.cases, title="")) if row["strategy"] == "ddp"]
    assert (row["state"], row["peak memory"], row["peak reserved"]) == ("oom", "900 MiB", "950 MiB")
    assert row["tokens/s/GPU"] == "-"
    assert all("ddp" not in {case.strategy for case in one.ranking.candidates} for one in findings(evidence))
    assert any("out of memory (needs)" in sentence for sentence in unranked(evidence))


def test_only_measured_cases_have_a_column_of_loss_parity() -> None:
    for setting in gather(both("emulated")).settings:
        heads = [column.head for column in case_table(setting.cases, title="").columns]
        assert ("loss parity" in heads) == ("measured" in setting.label)
    emulated = gather(run(rounds=1, failed=False, fidelity="emulated"))
    assert {row["loss parity"] for row in rows(proof_table(emulated))} == {"compares with nothing"}
    assert {(row["loss_parity"], row["parity_note"], row["cluster"]) for row in as_rows(emulated)} == {
        (None, "compares with nothing", "dgx-h100")
    }


def test_a_curve_says_that_it_is_of_dry_runs() -> None:
    larger = with_spec(dry(), dict.fromkeys(STRATEGIES[1:], 4))
    (scaling,) = scalings(gather(joined(dry(), larger)))
    hover = [str(curve["hovertemplate"]) for curve in scaling.chart.figure["data"] if "hovertemplate" in curve]
    assert any(text.startswith(f"fsdp2, dry run on {CLUSTER}") for text in hover)
    assert "dry run" not in scaling.table.caption
