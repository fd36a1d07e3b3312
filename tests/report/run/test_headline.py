"""The comparison's table and the tips of its chart, on the made run."""

from dataclasses import replace

from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.rankings import rankings
from refshard.report.run.charts import device_limit, tip, tradeoff
from refshard.report.run.tables import Headline, failures, headline
from tests.report.printed import rows
from tests.report.runs import CASES, run, with_record


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
