"""What a plan looks like: sentences, tables, JSON and the page."""

import re
from dataclasses import replace

import pytest

from refshard.analysis.rankings import ALIKE
from refshard.plan.checkpointing import NO_CHECKPOINTING, Checkpointing
from refshard.plan.recipe import find_recipe
from refshard.quantities import format_bytes, format_seconds
from refshard.report.answer import Marked
from refshard.report.plan import page as plan_page
from refshard.report.plan import table as plan_table
from refshard.report.plan import words as plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, rank_strategies
from refshard.specs.model import load_model
from tests.report.pages import Page
from tests.report.printed import as_csv, notes, rows, tables, text, verdict
from tests.simulate.made import cluster, hardware

GIB = 2**30


def made(*strategies: str, memory: int = 80 * GIB) -> tuple[Plan, Job]:
    on = cluster(hardware=hardware(memory_bytes=memory)).of_world_size(16)
    job = Job(model=load_model("llama3.2-1b"), cluster=on, seq_len=2048)
    return rank_strategies(job, [find_recipe(s) for s in strategies], NO_CHECKPOINTING, 2.0), job


def test_the_verdict_names_the_fastest_and_what_the_next_loses() -> None:
    plan, job = made("refshard-fsdp", "refshard-zero2")
    first, second = plan_words.verdict(plan, job)
    assert first.startswith(
        f"Fastest: {plan.rows[0].strategy}, {format_seconds(plan.rows[0].step.step_time_s)} per step"
    )
    more = plan.rows[1].step.step_time_s / plan.rows[0].step.step_time_s - 1
    assert second.startswith(f"Next: {plan.rows[1].strategy}, {100 * more:.1f} % slower, because of ")
    assert "waiting for reductions" in second or "waiting for gathers" in second


def test_strategies_that_the_model_cannot_tell_apart_are_not_ranked() -> None:
    plan, job = made("refshard-fsdp", "refshard-yafsdp")
    gap = plan.rows[1].step.step_time_s / plan.rows[0].step.step_time_s - 1
    assert gap < ALIKE
    smallest = min(plan.rows, key=lambda row: row.memory.peak)
    told = plan_words.verdict(plan, job)[1]
    assert told.startswith(f"Within the model's error of: {plan.rows[1].strategy}.")
    assert f"Lowest memory among them: {smallest.strategy}, {format_bytes(smallest.memory.peak)}." in told


def test_what_does_not_fit_is_said_and_where_nothing_does_what_would_help() -> None:
    plan, job = made("refshard-fsdp", "ddp", memory=20 * GIB)
    (ddp,) = (row for row in plan.rows if not row.fits)
    needs = f"ddp needs {format_bytes(ddp.memory.peak)}"
    assert plan_words.verdict(plan, job)[-1] == f"Out of memory (17.3 of 20.0 GiB usable): {needs}."
    assert plan_table.plan_answer(plan, job, "t", model="m", cluster="c").status == 0
    plan, job = made("refshard-fsdp", "ddp", memory=3 * GIB)
    (told,) = plan_words.verdict(plan, job)
    assert told.startswith("Nothing fits (983 MiB of 3.00 GiB usable): refshard-fsdp needs least, ")
    assert "with 0 of 16 layers checkpointed. Try: more checkpointed layers, more ranks, shorter sequences or" in told
    assert plan_table.plan_answer(plan, job, "t", model="m", cluster="c").status == 1
    hybrid = replace(job, replicas=2, sequences=4)
    recomputing = Checkpointing(frozenset(range(16)), by_op=True)
    (told,) = plan_words.verdict(rank_strategies(hybrid, [find_recipe("refshard-fsdp")], recomputing, 2.0), hybrid)
    assert "Try: whole layers checkpointed, a smaller microbatch, accumulated, fewer replicas, more ranks," in told


def test_warnings_say_what_the_figures_rest_on() -> None:
    plan, job = made("refshard-fsdp", memory=20 * GIB)
    told = plan_words.assumptions(plan, job)
    assert "Price: 2 USD per GPU-hour (--price)." in told
    assert any(sentence.startswith("Tensors can use 17.3 GiB of 20.0 GiB; ") for sentence in told)
    assert any("see docs/explanation/validation.md" in sentence for sentence in told)


def test_the_parts_of_every_row_add_up_to_its_step() -> None:
    plan, _ = made("refshard-fsdp", "fsdp1", "fsdp2", "ddp")
    for row in plan.rows:
        assert sum(plan_words.parts(row.step.account).values()) == pytest.approx(row.step.step_time_s)
        assert sum(row.memory.at_peak.values()) == row.memory.peak


def test_json_holds_everything_in_plain_units() -> None:
    plan, job = made("refshard-fsdp", "ddp")
    told = plan_table.as_object(plan, job, model="m", cluster="c")
    assert told["fidelity"] == "simulated"
    assert told["tokens_per_step"] == 16 * 2048
    assert [row["strategy"] for row in told["strategies"]] == [row.strategy for row in plan.rows]
    for row in told["strategies"]:
        assert sum(row["memory_bytes"].values()) == row["peak_memory_bytes"]
        spent = row["compute_s"] + row["copies_s"] + row["contention_s"] + row["optimizer_s"] + row["waits_s"]
        assert spent == pytest.approx(row["step_time_s"])
        assert row["cost_usd_per_trillion_tokens"] == 2 * row["gpu_hours_per_trillion_tokens"]


def test_the_terminal_shows_a_row_a_strategy_thrice_and_no_line_is_too_wide() -> None:
    plan, job = made("refshard-fsdp", "refshard-yafsdp", "ddp")
    found = plan_table.plan_answer(plan, job, "llama on made", model="m", cluster="c")
    shown = text(found, verbose=True)
    assert shown.startswith("llama on made (simulated)\n")
    assert len(re.findall(r"^refshard-yafsdp ", shown, re.MULTILINE)) == 3
    for width in (80, 120, 160):
        assert max(len(line) for line in text(found, width, verbose=True).splitlines()) <= width
    (summary,) = tables(found, detail=False)
    assert [row["strategy"] for row in rows(summary)] == [row.strategy for row in plan.rows]
    assert [row[1] for row in summary.rows] == [Marked("yes", "good")] * 3
    assert {note for note in notes(found) if "see docs/validation.md" in note}.isdisjoint(text(found).splitlines())
    assert verdict(found) == plan_words.verdict(plan, job)


def test_csv_has_a_column_for_each_part_of_the_memory_and_nothing_nested() -> None:
    plan, job = made("refshard-fsdp", "ddp")
    found = plan_table.plan_answer(plan, job, "t", model="m", cluster="c")
    for row, one in zip(as_csv(found), plan.rows):
        assert (row["strategy"], row["fits"]) == (one.strategy, "true")
        assert float(row["peak_memory_bytes"]) == one.memory.peak
        parts = [float(size) for name, size in row.items() if re.fullmatch("memory_.*_bytes", name)]
        assert sum(parts) == one.memory.peak
        assert not any("{" in cell for cell in row.values())


def test_the_page_escapes_names_runs_its_own_script_and_asks_for_nothing() -> None:
    plan, job = made("refshard-fsdp", "ddp")
    seen = Page("".join(plan_page.page(plan, job, "<script>alert(1)</script>", "refshard plan --model '<b>'")))
    assert "<script>alert(1)</script>" in seen.text
    assert seen.policy.startswith("default-src 'none'; script-src 'sha256-")
    for kind, script in seen.scripts:
        assert seen.allows(script) == (kind is None)
    assert [kind for kind, _ in seen.scripts].count(None) == 2
    assert not any(name in attributes for _, attributes in seen.tags for name in ("src", "action"))
    assert "http" not in seen.text
    assert [box["id"] for box in seen.having("div") if box.get("class") == "chart"] == ["tradeoff", "time", "memory"]


def test_the_charts_hold_what_the_tables_do() -> None:
    plan, _ = made("refshard-fsdp", "ddp")
    bars = plan_page.time_chart(plan).figure["data"]
    for place, row in enumerate(plan.rows):
        assert sum(bar["x"][place] for bar in bars) == pytest.approx(1e3 * row.step.step_time_s, rel=1e-4)
    chart = plan_page.memory_chart(plan)
    names = [row["text"] for row in chart.figure["layout"]["meta"]["rows"]]
    assert names == [f"{row.strategy} {format_bytes(row.memory.peak)}" for row in plan.rows]
    for place, row in enumerate(plan.rows):
        total = sum(bar["x"][place] for bar in chart.figure["data"])
        assert total == pytest.approx(row.memory.peak / GIB, rel=1e-4)
    assert chart.alternative.endswith(f"Dashed: usable memory, {format_bytes(plan.usable_bytes)}.")


def test_memory_that_dwarfs_the_limit_is_cut() -> None:
    """Else the limit, and what fits, could not be seen."""
    plan, _ = made("refshard-fsdp", "ddp", memory=3 * GIB)
    layout = plan_page.memory_chart(plan).figure["layout"]
    (limit,) = [shape["x0"] for shape in layout["shapes"]]
    assert limit == pytest.approx(plan.usable_bytes / GIB)
    assert layout["xaxis"]["range"] == [0, pytest.approx(1.6 * limit)]
