"""What a plan looks like: sentences, tables, JSON and the page."""

import re
from dataclasses import replace

import pytest

from refshard.analysis.contests import ALIKE
from refshard.plan.checkpointing import NO_CHECKPOINTING, Checkpointing
from refshard.plan.recipe import find_recipe
from refshard.report.draw.stacked_bars import Bars, alternative, draw, legend
from refshard.report.plan import page as plan_page
from refshard.report.plan import table as plan_table
from refshard.report.plan import words as plan_words
from refshard.simulate.forecast import Job
from refshard.simulate.ranking import Plan, rank_strategies
from refshard.specs.model import load_model
from tests.simulate.made import cluster, hardware

GIB = 2**30


def made(*strategies: str, memory: int = 80 * GIB) -> tuple[Plan, Job]:
    on = cluster(hardware=hardware(memory_bytes=memory)).of_world_size(16)
    job = Job(model=load_model("llama3.2-1b"), cluster=on, seq_len=2048)
    return rank_strategies(job, [find_recipe(s) for s in strategies], NO_CHECKPOINTING, 2.0), job


def test_the_verdict_names_the_fastest_and_what_the_next_loses() -> None:
    plan, job = made("refshard-fsdp", "refshard-zero2")
    first, second = plan_words.verdict(plan, job)
    assert first.startswith(f"{plan.rows[0].strategy} takes ")
    more = plan.rows[1].step.step_time_s / plan.rows[0].step.step_time_s - 1
    assert second.startswith(f"The next, {plan.rows[1].strategy}, takes {100 * more:.1f} % longer: ")
    assert "waiting for reductions" in second or "waiting for gathers" in second


def test_strategies_that_the_model_cannot_tell_apart_are_not_ranked() -> None:
    plan, job = made("refshard-fsdp", "refshard-yafsdp")
    gap = plan.rows[1].step.step_time_s / plan.rows[0].step.step_time_s - 1
    assert gap < ALIKE
    leanest = min(plan.rows, key=lambda row: row.memory.peak)
    told = plan_words.verdict(plan, job)[1]
    assert told.startswith(f"The model cannot tell it from {plan.rows[1].strategy} in time")
    assert f"{leanest.strategy} needs least memory" in told


def test_what_does_not_fit_is_said_and_where_nothing_does_what_would_help() -> None:
    plan, job = made("refshard-fsdp", "ddp", memory=20 * GIB)
    assert plan_words.verdict(plan, job)[-1].startswith(
        "Too large for 17.3 GiB, which tensors can fill of 20.0 GiB: ddp ("
    )
    plan, job = made("refshard-fsdp", "ddp", memory=3 * GIB)
    (told,) = plan_words.verdict(plan, job)
    assert told.startswith(
        "Nothing fits in 983 MiB, which tensors can fill of 3.00 GiB: refshard-fsdp, the leanest, needs "
    )
    assert "with 0 of 16 layers checkpointed; use more checkpointed layers, more ranks, shorter sequences or" in told
    hybrid = replace(job, replicas=2, sequences=4)
    recomputing = Checkpointing(frozenset(range(16)), by_op=True)
    (told,) = plan_words.verdict(rank_strategies(hybrid, [find_recipe("refshard-fsdp")], recomputing, 2.0), hybrid)
    assert "use whole layers checkpointed, a smaller microbatch, accumulated, fewer replicas, more ranks," in told


def test_warnings_say_what_the_figures_rest_on() -> None:
    plan, job = made("refshard-fsdp", memory=20 * GIB)
    told = plan_words.warnings(plan, job)
    assert "USD are at 2 per GPU and hour (--price)." in told
    assert any(sentence.startswith("Tensors can fill 17.3 GiB of 20.0 GiB: ") for sentence in told)
    assert any("see docs/validation.md" in sentence for sentence in told)


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
    text = plan_table.terminal_plan(plan, job, "llama on made")
    assert text.startswith("llama on made (simulated)\n")
    assert len(re.findall(r"^refshard-yafsdp ", text, re.MULTILINE)) == 3
    assert max(len(line) for line in text.splitlines()) <= 160


def test_the_page_escapes_names_runs_no_script_and_asks_for_nothing() -> None:
    plan, job = made("refshard-fsdp", "ddp")
    html = "".join(plan_page.page(plan, job, "<script>alert(1)</script>", "refshard plan --model '<b>'"))
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html
    assert html.count('class="bars"') == 2


def bars(**changes: object) -> Bars:
    fields = {"title": "T", "rows": ("a", "<b>"), "parts": ("p", "q"), "values": ((1.0, 3.0), (2.0, 0.0)), "text": str}
    return Bars(**{**fields, **changes})  # type: ignore[arg-type]


def test_bars_are_in_proportion_and_say_their_totals() -> None:
    widths = [float(w) for w in re.findall(r'<rect [^>]* width="([\d.]+)"', draw(bars()))]
    assert widths[0] * 3 == pytest.approx(widths[1], rel=0.01)
    assert widths[0] * 2 == pytest.approx(widths[2], rel=0.01)
    assert len(widths) == 3
    assert alternative(bars()) == "T: a 4.0, <b> 2.0."
    assert "&lt;b&gt;, p: 2.0" in draw(bars())
    assert legend(bars(values=((1.0, 0.0), (2.0, 0.0)))) == [("p", legend(bars())[0][1])]


def test_a_bar_that_dwarfs_the_limit_is_cut_and_says_so() -> None:
    drawn = draw(bars(values=((1.0, 1.0), (500.0, 500.0)), limit=2.0))
    assert "\N{RIGHTWARDS ARROW} 1000.0" in drawn
    assert "\N{RIGHTWARDS ARROW} 2.0" not in drawn
    edges = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"', drawn)]
    assert max(edges) <= 871
