"""What part of a dry run's prices a trace measured, and how far the prediction is from that trace."""

from collections.abc import Iterator
from typing import Any

from refshard.dryrun.analyse import Analysis
from refshard.quantities import format_percent, format_seconds
from refshard.report.blocks import Answer, Cover, Quantity, Row, Section, Verdict, table

_NAMED = 3


def prices_answer(found: Analysis, alone: Analysis) -> Answer:
    """The errors of a prediction against the trace that priced it, and of one by the model ``alone``."""
    data, command = as_object(found, alone) or {}, " ".join(found.run.request.command)
    verdict = Verdict(sentences=list(measured_sentences(found, alone)), style="good")
    return Answer(
        data=data,
        rows=data["kernel_times"],
        blocks=[*compared(found, alone), verdict],
        status=0,
        cover=Cover(title=command, about="A dry run against a trace of the same job.", fidelity="dry run"),
    )


def measured_sentences(found: Analysis, alone: Analysis | None) -> Iterator[str]:
    """How much is measured, and the trace's own step; ``alone`` is the prediction without the trace."""
    if (part := found.coverage) is None or found.measured is None:
        return
    name, every = found.measured.trace.path.name, part.matched == part.launches
    rest = "Links" if every else "The rest, links"
    longest = ", ".join(f"{operator} {format_seconds(each)}" for operator, each in part.unmatched[:_NAMED])
    yield (
        f"Prices: {format_percent(part.share)} of compute time is measured in {name} ({part.matched:,} of "
        f"{part.launches:,} kernels of a step). {rest} and the host are modelled."
        + (f" Longest modelled: {longest}." if longest else "")
    )
    own = found.measured.step_s
    if alone is not None and own and found.step_s and alone.step_s:
        yield (
            f"Step time in the trace {format_seconds(own)}; predicted {_beside(found.step_s, own)} with its prices, "
            f"{_beside(alone.step_s, own)} by the model alone. A profiler slows the host down."
        )


def _beside(predicted: float, own: float) -> str:
    return f"{format_seconds(predicted)} ({_error(predicted, own)})"


def _error(predicted: float, own: float) -> str:
    return f"{predicted / own - 1:+.1%}".replace("%", " %") if own else "-"


def kernel_times(found: Analysis, alone: Analysis | None) -> list[dict[str, Any]]:
    """Seconds of a step's kernels by class: in the trace, predicted with its prices, and by the model alone."""
    if alone is None or found.measured is None:
        return []
    runs = {"trace": found.measured.analysis, "with_prices": found.traced, "model": alone.traced}
    seconds: dict[str, dict[str, float]] = {}
    for key, one in runs.items():
        report = None if one is None else one.figures.operators
        for kind in () if report is None else report.classes:
            seconds.setdefault(kind.name, {})[key] = kind.ns / report.steps / 1e9  # type: ignore[union-attr]
    seconds.pop("communication", None)
    rows = [{"class": name, **dict.fromkeys(runs, 0.0), **each} for name, each in seconds.items()]
    return [*rows, {"class": "all", **{key: sum(row[key] for row in rows) for key in runs}}]


def compared(found: Analysis, alone: Analysis | None) -> Iterator[Section]:
    """The kernels' time of a step by class."""
    rows: list[Row] = [
        {
            "kernels of a step": one["class"], "trace": Quantity(one["trace"], "s"),
            "predicted": Quantity(one["with_prices"], "s"), "error": _error(one["with_prices"], one["trace"]),
            "by the model": Quantity(one["model"], "s"), "its error": _error(one["model"], one["trace"]),
        }
        for one in kernel_times(found, alone)
    ]  # fmt: skip
    if rows:
        yield Section(title="Prices", id="prices", nav="Prices", heading=False, blocks=[table(rows)])


def as_object(found: Analysis, alone: Analysis | None) -> dict[str, Any] | None:
    """For ``--json``: seconds, and the part of compute time that is measured."""
    if (part := found.coverage) is None or found.measured is None:
        return None
    return {
        "trace": str(found.measured.trace.path),
        "share": part.share,
        "kernels": part.launches,
        "matched": part.matched,
        "unmatched": [{"operator": name, "seconds": each} for name, each in part.unmatched],
        "step_s": found.step_s,
        "trace_step_s": found.measured.step_s,
        "model_step_s": None if alone is None else alone.step_s,
        "kernel_times": kernel_times(found, alone),
    }
