"""The answer of a sweep: all combinations, the best that fits, and the front of speed against memory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from refshard.analysis.ratios import ALIKE
from refshard.dryrun.sweep import Row, front, ranked
from refshard.errors import Status
from refshard.quantities import format_bytes, format_percent
from refshard.report.blocks import Answer, Block, Charts, Cover, Quantity, Section, Text, Verdict, table
from refshard.report.verdict import use
from refshard.specs.choice import leanest

if TYPE_CHECKING:
    from refshard.report.draw.charts import Chart


def sweep_answer(rows: Sequence[Row], command: str, *, folder: Path, searched: str = "") -> Answer:
    """All rows as a table; the status is 0 if one fits, 3 if none gave an answer. ``searched`` names the number that
    was searched for.
    """
    best = front(rows)
    verdict = Verdict(
        sentences=list(_sentences(rows, searched)), style="good" if any(row.tried.fits for row in rows) else "bad"
    )
    answered = any(row.tried.fits is not None for row in rows)
    shown = [_cells(row, row in best) for row in rows]
    blocks: list[Block] = [Text(text=f"dry runs: {command}", where="terminal")]
    if len(ranked(rows)) > 1:
        blocks.append(Charts(draw=lambda: _charts(rows)))
    blocks += [
        Section(
            title="All combinations", id="combinations", nav="Combinations", heading=False, blocks=[
                table(shown, left=len(rows[0].choices),
                      caption="*: no other is as fast in as little memory. Tight: the allocator empties its cache"),
            ],
        ),
        Text(text=f"saved in {folder}", where="terminal"),
        verdict,
    ]  # fmt: skip
    return Answer(
        data={"command": command, "rows": [_as_object(row, row in best) for row in rows]},
        rows=[_flat(row, row in best) for row in rows],
        blocks=blocks,
        status=0 if any(row.tried.fits for row in rows) else 1 if answered else Status.NO_VERDICT,
        cover=Cover(
            title=command, about=f"{len(rows)} dry runs. The script ran on fake GPUs; nothing was computed.",
            fidelity="dry run",
        ),
    )  # fmt: skip


def named(choices: Mapping[str, str]) -> str:
    """Choices as text.

    >>> named({"--batch": "2", "--checkpoint": "yes", "GPUs": "8"})
    '--batch 2, --checkpoint, 8 GPUs'
    """
    texts = {
        name: f"{text} GPUs" if name == "GPUs" else name if text == "yes" else f"{name} {text}"
        for name, text in choices.items()
    }
    return ", ".join(text if choices[name] != "no" else f"no {name}" for name, text in texts.items())


def _sentences(rows: Sequence[Row], searched: str) -> Iterator[str]:
    failed = [row for row in rows if row.tried.fits is None]
    unfit = [row for row in rows if row.tried.fits is False]
    if searched:
        yield from _largest(rows, searched)
    elif not any(row.tried.fits for row in rows) and unfit:
        least = min(unfit, key=lambda row: row.tried.reserved_bytes)
        yield (
            f"NOTHING FITS: 0 of {len(rows)} combinations; least memory: {named(least.choices)}, which "
            f"{least.tried.why}"
        )
    by_size: dict[int, list[Row]] = {}
    for row in ranked(rows):
        by_size.setdefault(row.trial.request.world_size, []).append(row)
    for some in by_size.values():
        yield from _to_use(some)
    if failed:
        none = "No verdict" if len(failed) == len(rows) else f"No answer for {len(failed)} of {len(rows)} combinations"
        yield f"{none}: {named(failed[0].choices) or 'the command as given'}: {failed[0].tried.why}"


def _to_use(rows: Sequence[Row]) -> Iterator[str]:
    """The combination to use, of those that fit, fastest first, and its figures."""
    first = rows[0]
    fastest = [row for row in rows if _speed(row) * (1 + ALIKE) >= _speed(first)]
    best = leanest(fastest, lambda row: row.tried.reserved_bytes, lambda _: "")
    name = named(best.choices) or "the command as given"
    if best is first:
        yield f"Use {name}: the fastest that fits."
    else:
        yield use(name, named(first.choices), (best.tried.reserved_bytes, first.tried.reserved_bytes), None)
    memory = f"{format_bytes(best.tried.reserved_bytes)} of {format_bytes(best.tried.usable_bytes)}"
    yield f"{_speed(best):,.0f} tokens/s/GPU, {memory} reserved, by dry run; {format_percent(ALIKE, 0)} is a tie."


def _speed(row: Row) -> float:
    return row.tried.tokens_per_s or 0.0


def _largest(rows: Sequence[Row], searched: str) -> Iterator[str]:
    """The largest number that fits, under each combination of the other choices."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        others = tuple((name, text) for name, text in row.choices.items() if name != searched)
        groups.setdefault(others, []).append(row)
    for others, tried in groups.items():
        where = f" with {named(dict(others))}" if others else ""
        fitting = [row for row in tried if row.tried.fits]
        above = next((row for row in tried if row.tried.fits is not True), None)
        beyond = "" if above is None else f"; {above.choices[searched]} {above.tried.why or 'fails'}"
        if fitting:
            memory = (
                f"{format_bytes(fitting[-1].tried.reserved_bytes)} of {format_bytes(fitting[-1].tried.usable_bytes)}"
            )
            yield f"LARGEST {searched}{where}: {fitting[-1].choices[searched]} ({memory}{beyond})"
        else:
            yield f"LARGEST {searched}{where}: none fits{beyond}"


def _cells(row: Row, best: bool) -> dict[str, Any]:
    tried = row.tried
    state = {True: "fits, tight" if tried.retries else "fits", False: "does not fit", None: "no answer"}[tried.fits]
    return {
        **row.choices, "Pareto": "*" if best else "", "memory": state,
        "peak reserved": Quantity(tried.reserved_bytes, "B") if tried.reserved_bytes else None,
        "step time": None if tried.step_s is None else Quantity(tried.step_s, "s"),
        "tokens/s/GPU": None if tried.tokens_per_s is None else round(tried.tokens_per_s),
        "MFU": None if tried.mfu is None else Quantity(tried.mfu, "share"),
        "exposed comm.": None if tried.exposed_s is None else Quantity(tried.exposed_s, "s"),
        **({} if tried.measured is None else {"compute measured": Quantity(tried.measured, "share")}),
    }  # fmt: skip


def _as_object(row: Row, best: bool) -> dict[str, Any]:
    request = row.trial.request
    return {
        "choices": dict(row.choices), "command": request.command, "cluster": request.cluster,
        "gpus": request.world_size, "pareto": best, **msgspec.to_builtins(row.tried),
        "tokens_per_s_all_gpus": row.total_tokens_per_s,
    }  # fmt: skip


def _flat(row: Row, best: bool) -> dict[str, Any]:
    found = _as_object(row, best)
    return {**found.pop("choices"), **found, "command": " ".join(row.trial.request.command)}


def _charts(rows: Sequence[Row]) -> "list[Chart]":
    from refshard.report.dryrun.sweep_picture import speed_and_memory  # plotly takes a second to import

    return [speed_and_memory(rows)]
