"""What docs/explanation/when-to-shard.md says is what the recorded runs hold."""

from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pytest

from refshard.quantities import GIB, MIB
from tests.printed import as_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "when-to-shard.md").read_text()
RECORDED = ROOT / "profiles" / "recorded"
SPEED, LIMITS = "xeon-2-cores/when_to_shard", "epyc-2-cores/least_memory"
STRATEGIES = ("fsdp2", "fsdp2-tuned", "refshard-yafsdp", "tensor-parallel")
PLANNED = (
    ("llama3.2-1b", "dgx-h100", 8192),
    ("llama3.2-1b", "dgx-h100", 512),
    ("llama3.2-1b", "h100-eth100x2", 8192),
    ("llama3-8b", "dgx-h100", 8192),
    ("llama3-8b", "h100-eth100x2", 8192),
)
ON_GPUS = ("ddp", "fsdp2", "refshard-yafsdp", "refshard-zero1", "refshard-zero2")

Row = dict[str, Any]
Plan = dict[str, Row]


def rows_of(run: str, *, against: str | None = None) -> list[Row]:
    """The cases of two ranks; with ``against``, with their ratios to that strategy where it is another."""
    rows = as_json("show", str(RECORDED / run))["cases"]
    if against is not None:
        compared = as_json("compare", against, "--run", str(RECORDED / run))["cases"]
        ratios = {row["case"]: row for row in compared}
        rows = [{**row, **ratios.get(row["case"], {})} for row in rows]
    return [row for row in rows if row["gpus"] == 2]


def settings(rows: list[Row]) -> list[tuple[tuple[str, int, int], dict[str, Row]]]:
    """Model, tokens a rank and microbatches, with the rows of each by strategy."""

    def key(row: Row) -> tuple[str, int, int]:
        return row["model"], row["global_batch"] // 2 * row["seq_len"], row["microbatches"]

    ordered = sorted(rows, key=lambda row: (row["microbatches"], row["model"] != "llama-tiny", key(row)[1]))
    return [(found, {row["strategy"]: row for row in members}) for found, members in groupby(ordered, key)]


def ratio(row: Row) -> str:
    return f"{row['step_time_ratio']:.2f} ({row['step_time_ratio_low']:.2f} to {row['step_time_ratio_high']:.2f})"


def speed() -> list[str]:
    """A line a setting: DDP's step time, and how many times that each other takes."""
    return [
        f"| {model} | {tokens:,} | {rows['ddp']['step_time_s'] * 1e3:.0f} ms | "
        + " | ".join(ratio(rows[name]) for name in STRATEGIES)
        + " |"
        for (model, tokens, parts), rows in settings(rows_of(SPEED, against="ddp"))
        if parts == 1
    ]


def stages() -> list[str]:
    """The same, of pipelines: in four microbatches."""
    return [
        f"| {model} | {tokens:,} | {rows['ddp']['step_time_s'] * 1e3:.0f} ms | {ratio(rows['refshard-yafsdp'])} | "
        f"{ratio(rows['pipeline'])} | {rows['pipeline']['peak_memory_ratio']:.2f} |"
        for (model, tokens, parts), rows in settings(rows_of(SPEED, against="ddp"))
        if parts == 4
    ]


def memory() -> list[str]:
    """A line a setting: DDP's peak, and each other's as a part of it."""
    return [
        f"| {model} | {tokens:,} | {rows['ddp']['peak_memory_bytes'] / MIB:.0f} MiB | "
        + " | ".join(f"{rows[name]['peak_memory_ratio']:.2f}" for name in STRATEGIES)
        + " |"
        for (model, tokens, parts), rows in settings(rows_of(SPEED, against="ddp"))
        if parts == 1
    ]


def least() -> list[str]:
    """A line a strategy: the peak as the allocator counts, and the lowest limit with which every launch ran, as with
    all above it.
    """
    found = []
    ordered = sorted(rows_of(LIMITS), key=lambda row: (row["strategy"], -row["memory_limit_gib"]))
    for strategy, members in groupby(ordered, lambda row: str(row["strategy"])):
        rows = list(members)
        ran = list(takewhile(lambda row: row["state"] == "ok", rows))
        limit = f"{ran[-1]['memory_limit_gib']} GiB" if ran else f"more than {rows[0]['memory_limit_gib']} GiB"
        found.append(f"| `{strategy}` | {rows[0]['peak_memory_bytes'] / MIB:.0f} MiB | {limit} |")
    return found


def planned(model: str, cluster: str, tokens: int, *, replicas: int = 1, strategies: tuple[str, ...] = ON_GPUS) -> Plan:
    """The plan's rows by strategy, those that fit and those that do not."""
    job = ["--model", model, "--cluster", cluster, "--seq-len", str(tokens), "--dp-replicate", str(replicas)]
    (size,) = as_json("plan", *job, "--strategy", ",".join(strategies))["sizes"]
    return {row["job"]["strategy"]: row for row in (*size["rows"], *size["unfit"])}


def in_cell(row: Row) -> str:
    time, peak = f"{row['step_s'] * 1e3:.0f} ms", f"{row['peak_bytes'] / GIB:.0f} GiB"
    return f"{time}, {peak}" if row["fits"] else f"does not fit ({peak})"


def predicted() -> list[str]:
    """A line a plan: each strategy's step time and peak memory."""
    found = []
    for model, cluster, tokens in PLANNED:
        rows = planned(model, cluster, tokens)
        cells = " | ".join(in_cell(rows[name]) for name in ON_GPUS)
        found.append(f"| {model} | {cluster} | {tokens:,} | {cells} |")
    return found


def hybrid() -> list[str]:
    """A line a plan on two nodes: sharded over both, and within each."""
    found = []
    for model, cluster, tokens in PLANNED:
        if cluster.endswith("x2"):
            whole = planned(model, cluster, tokens, strategies=("refshard-fsdp", "refshard-zero2"))
            within = planned(model, cluster, tokens, replicas=2, strategies=("refshard-fsdp",))
            rows = (whole["refshard-fsdp"], whole["refshard-zero2"], within["refshard-fsdp"])
            found.append(f"| {model} | {cluster} | {tokens:,} | {' | '.join(map(in_cell, rows))} |")
    return found


def test_every_line_of_a_table_is_of_the_records() -> None:
    for lines in (speed(), memory(), stages(), least(), predicted()):
        assert lines
        for line in lines:
            assert line in PAGE, line


def test_no_other_line_is_in_the_measured_tables() -> None:
    measured = PAGE[PAGE.index("## Measured") : PAGE.index("## On GPUs")]
    lines = [line for line in measured.splitlines() if line.startswith(("| llama", "| `"))]
    assert sorted(lines) == sorted([*speed(), *memory(), *stages(), *least()])


def test_the_table_of_plans_shows_every_row_and_no_other() -> None:
    lines = [line for line in PAGE[PAGE.index("## On GPUs") :].splitlines() if line.startswith("| llama")]
    assert lines == [*predicted(), *hybrid()]


def test_zero_1_and_2_are_ahead_on_ethernet_by_what_the_page_says() -> None:
    """They gather parameters once a step, where FSDP gathers twice."""
    for model, cluster, tokens in PLANNED:
        if "eth" in cluster:
            rows = planned(model, cluster, tokens)
            times = {name: row["step_s"] for name, row in rows.items()}
            shorter = 1 - max(times["refshard-zero1"], times["refshard-zero2"]) / times["refshard-yafsdp"]
            assert f"{shorter:.0%} shorter ({model})".replace("%", " %") in " ".join(PAGE.split())
