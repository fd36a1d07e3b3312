"""What docs/when-to-shard.md says is what the recorded runs hold."""

import json
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.show import show
from refshard.quantities import GIB, MIB

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "when-to-shard.md").read_text()
RECORDED = ROOT / "profiles" / "recorded" / "epyc-2-cores"
STRATEGIES = ("fsdp2", "fsdp2-tuned", "refshard-yafsdp", "tensor-parallel")
PLANNED = (
    ("llama3.2-1b", "dgx-h100", 8192),
    ("llama3.2-1b", "dgx-h100", 512),
    ("llama3.2-1b", "h100-eth100x2", 8192),
    ("llama3-8b", "dgx-h100", 8192),
)

Row = dict[str, Any]


def rows_of(run: str, *, against: str | None = None) -> list[Row]:
    rows: list[Row] = json.loads(show(RECORDED / run, as_json=True, against=against))
    return [row for row in rows if row["world_size"] == 2]


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
        for (model, tokens, parts), rows in settings(rows_of("when_to_shard", against="ddp"))
        if parts == 1
    ]


def stages() -> list[str]:
    """The same, of pipelines: in four microbatches."""
    return [
        f"| {model} | {tokens:,} | {rows['ddp']['step_time_s'] * 1e3:.0f} ms | {ratio(rows['refshard-yafsdp'])} | "
        f"{ratio(rows['pipeline'])} | {rows['pipeline']['peak_memory_ratio']:.2f} |"
        for (model, tokens, parts), rows in settings(rows_of("when_to_shard", against="ddp"))
        if parts == 4
    ]


def memory() -> list[str]:
    """A line a setting: DDP's peak, and each other's as a part of it."""
    return [
        f"| {model} | {tokens:,} | {rows['ddp']['peak_memory_bytes'] / MIB:.0f} MiB | "
        + " | ".join(f"{rows[name]['peak_memory_ratio']:.2f}" for name in STRATEGIES)
        + " |"
        for (model, tokens, parts), rows in settings(rows_of("when_to_shard", against="ddp"))
        if parts == 1
    ]


def least() -> list[str]:
    """A line a strategy: the peak as the allocator counts, and the lowest limit with which every launch ran, as with
    all above it.
    """
    found = []
    ordered = sorted(rows_of("least_memory"), key=lambda row: (row["strategy"], -row["memory_limit_gib"]))
    for strategy, members in groupby(ordered, lambda row: str(row["strategy"])):
        rows = list(members)
        ran = list(takewhile(lambda row: row["state"] == "ok", rows))
        limit = f"{ran[-1]['memory_limit_gib']} GiB" if ran else f"more than {rows[0]['memory_limit_gib']} GiB"
        found.append(f"| `{strategy}` | {rows[0]['peak_memory_bytes'] / MIB:.0f} MiB | {limit} |")
    return found


def predicted() -> list[str]:
    """A line a plan: each strategy's step time and peak memory."""
    found = []
    for model, cluster, tokens in PLANNED:
        words = ["plan", "--model", model, "--cluster", cluster, "--seq-len", str(tokens), "--json"]
        made = CliRunner().invoke(app, [*words, "--strategy", "ddp,fsdp2,refshard-yafsdp"])
        rows = {row["strategy"]: row for row in json.loads(made.stdout)["strategies"]}
        cells = [
            f"{row['step_time_s'] * 1e3:.0f} ms, {row['peak_memory_bytes'] / GIB:.0f} GiB"
            if row["fits"]
            else f"does not fit ({row['peak_memory_bytes'] / GIB:.0f} GiB)"
            for row in (rows[name] for name in ("ddp", "fsdp2", "refshard-yafsdp"))
        ]
        found.append(f"| {model} | {cluster} | {tokens:,} | {' | '.join(cells)} |")
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
