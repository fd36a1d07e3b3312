"""Which operators and kernels take the time, at which rate, and what communication beside them costs, as sections."""

from collections.abc import Mapping, Sequence

from refshard.analysis.figures import Contention, OperatorReport, Slowdown, TraceFigures
from refshard.quantities import format_ns, format_percent, format_rate
from refshard.report.blocks import Section
from refshard.report.trace.findings import SMALL
from refshard.report.trace.wording import count_per, cut, in_each, per, section

_CALLED: dict[str, str] = {
    "GEMM": "GEMMs", "convolution": "convolutions", "elementwise": "elementwise kernels", "others": "other kernels",
}  # fmt: skip
"""Classes in sentences, where not by their names."""
_LONGEST = 60
_COMPARED = (
    "kernels that ran at least 3 times mostly beside communication and 3 times without any, and did the same work; "
    "medians are compared."
)


def class_section(figures: TraceFigures) -> Section | None:
    """What kind of work takes which part of all, and what to look at first."""
    report = figures.operators
    if report is None or not report.work_ns:
        return None
    rows = [
        {
            "class": one.name,
            "count": count_per(one.count, report.steps),
            "time": format_ns(one.ns / report.steps),
            "share": format_percent(one.share),
        }
        for one in report.classes
    ]
    sentences = [_shares(report, figures), *_first(report, figures)]
    if not report.has_shapes:
        sentences.append("No FLOPs: the trace has no shapes; record it with record_shapes=True.")
    elif report.hardware is None:
        unnamed = "this CPU" if figures.device == "cpu" else figures.device
        why = f"there is no hardware profile of {unnamed}"
        why = "the trace does not name its GPU" if figures.device == "gpu" else why
        sentences.append(f"No shares of a peak: {why}.")
    return section(
        title="Work by class",
        caption=f"{per(figures).capitalize()}; shares are of all work but communication. Durations add up: what runs "
        "at once counts twice.",
        rows=rows,
        sentences=sentences,
    )


def operator_section(figures: TraceFigures) -> Section | None:
    """The operators that take longest, whatever their shapes."""
    report = figures.operators
    if report is None or not report.totals:
        return None
    rows = [
        {
            "operator": cut(one.name, _LONGEST),
            "class": one.kind,
            "calls": count_per(one.calls, report.steps),
            "time": format_ns(one.ns / report.steps),
            "per call": format_ns(one.ns / one.calls),
            "share": format_percent(one.share),
            "TFLOPS": _tera(one.flops_per_s),
            "of peak": format_percent(one.of_peak, 0),
            "of roofline": format_percent(one.of_roofline, 0),
        }
        for one in report.totals
    ]
    return section(
        title="Operators",
        caption=(
            f"{per(figures).capitalize()}: what the host called, and how long the kernels took that it launched for it."
            f"{_left_out(report.totals, report.total_count)}"
        ),
        rows=_told(rows, "TFLOPS", "of peak", "of roofline"),
        text=("class",),
    )


def shape_section(figures: TraceFigures) -> Section | None:
    """The same by the shapes of their arguments, with the rate that each reaches."""
    report = figures.operators
    if report is None or not any(one.shapes for one in report.operators):
        return None
    rows = [
        {
            "operator": cut(one.name, _LONGEST),
            "shapes": cut(one.shapes or "-", _LONGEST),
            "dtype": one.dtype or "-",
            "calls": count_per(one.calls, report.steps),
            "time": format_ns(one.ns / report.steps),
            "share": format_percent(one.share),
            "TFLOPS": _tera(one.flops_per_s),
            "of peak": format_percent(one.of_peak, 0),
            "of roofline": format_percent(one.of_roofline, 0),
            "bound by": one.bound or "-",
        }
        for one in report.operators
    ]
    profile = f" Peaks: the hardware profile {report.hardware}." if report.hardware else ""
    return section(
        title="Operators by shape",
        caption=f"{per(figures).capitalize()}; bytes are the least that each must move.{profile}"
        f"{_left_out(report.operators, report.operator_count)}",
        rows=_told(rows, "TFLOPS", "of peak", "of roofline", "bound by"),
        text=("shapes", "dtype", "bound by"),
    )


def kernel_section(figures: TraceFigures) -> Section | None:
    """The kernels that take longest."""
    report = figures.operators
    if report is None or not report.kernels:
        return None
    rows = [
        {
            "kernel": one.short,
            "class": one.kind,
            "count": count_per(one.count, report.steps),
            "time": format_ns(one.ns / report.steps),
            "each": format_ns(one.ns / one.count),
            "share": format_percent(one.share),
        }
        for one in report.kernels
    ]
    caption = (
        f"{per(figures).capitalize()}, without those that communicate; names are shortened (--json has them whole)."
    )
    caption += _left_out(report.kernels, report.kernel_count)
    return section(title="Kernels", caption=caption, rows=rows, text=("class",))


def contention_section(figures: TraceFigures) -> Section | None:
    """How much longer kernels take beside communication than alone."""
    report = figures.operators
    if report is None or report.contention is None:
        return None
    found = report.contention
    rows = [_slowdown(one, report, f"all {_CALLED.get(one.kind, one.kind)}") for one in _gemms_first(found)] + [
        _slowdown(one, report, one.name) for one in found.kernels
    ]
    return section(
        title="Beside communication",
        caption=f"{per(figures).capitalize()}: {_COMPARED}" if rows else "",
        rows=rows,
        sentences=_lost(found, report, figures),
    )


def _gemms_first(found: Contention) -> list[Slowdown]:
    return sorted(found.classes, key=lambda one: (one.kind != "GEMM", -one.lost_ns))


def _slowdown(one: Slowdown, report: OperatorReport, name: str) -> dict[str, str]:
    return {
        "kernels": name,
        "runs beside": count_per(one.runs, report.steps),
        "time beside": format_ns(one.beside_ns / report.steps),
        "time alone": format_ns(one.alone_ns / report.steps),
        "slower": "no" if one.times is None else f"{one.times:.2f}x",
        "lost": format_ns(one.lost_ns / report.steps) if one.slower else "none",
    }


def _lost(found: Contention, report: OperatorReport, figures: TraceFigures) -> list[str]:
    """What is lost in all, GEMMs first, and of how much of the work that can be said."""
    sentences = []
    for one in _gemms_first(found)[:3]:
        if one.times and one.times > 1 + SMALL:
            what = _CALLED.get(one.kind, one.kind)
            verb = "are" if what.endswith("s") else "is"
            lost = format_ns(one.lost_ns / report.steps)
            name = f"{what[0].upper()}{what[1:]}"
            sentences.append(f"{name} {verb} {one.times:.2f}x slower beside communication: {lost} {in_each(figures)}.")
    if not sentences and found.classes:
        sentences.append("No class of kernels is slower beside communication.")
    if found.classes:
        sentences.append(f"Compared: {_part(found.compared_ns, found)} of the time of kernels beside communication.")
    else:
        sentences.append(
            "No kernel can be compared: none did the same work 3 times beside communication and 3 times without any."
        )
    if found.shapeless_ns:
        sentences.append(
            f"For {_part(found.shapeless_ns, found)} of that time the shapes are unknown, and nothing else tells which "
            "kernels do the same work; record the trace with record_shapes=True."
        )
    return sentences


def _part(ns: int, found: Contention) -> str:
    return format_percent(ns / found.beside_ns if found.beside_ns else None, 0)


def _shares(report: OperatorReport, figures: TraceFigures) -> str:
    """Which classes take which part."""
    known = [one for one in report.classes if one.share is not None and one.share >= SMALL][:4]
    parts = [f"{_CALLED.get(one.name, one.name)} {format_percent(one.share, 0)}" for one in known]
    work = "operators" if not report.kernels else "kernels and copies"
    every = f"Of {format_ns(report.work_ns / report.steps)} of {work} {in_each(figures)}: {', '.join(parts)}."
    comm = sum(one.ns for one in report.classes if one.share is None)
    return f"{every} Communication takes {format_ns(comm / report.steps)} more." if comm else every


def _first(report: OperatorReport, figures: TraceFigures) -> list[str]:
    """The operator that would gain most at its roofline; without one, the one that takes longest."""
    gains = [(one.ns * (1 - min(1.0, one.of_roofline)), one) for one in report.operators if one.of_roofline is not None]
    if gains:
        gain, worst = max(gains, key=lambda pair: pair[0])
        if gain >= SMALL * report.work_ns:
            name = f"{worst.name} of {cut(worst.shapes, _LONGEST)} {worst.dtype}" if worst.shapes else worst.name
            return [
                f"The operator that could gain most is {name}: it takes {format_ns(worst.ns / report.steps)} "
                f"{in_each(figures)}, at {format_percent(worst.of_roofline, 0)} of its roofline ({worst.bound}-bound), "
                f"so at most {format_ns(gain / report.steps)} can be gained."
            ]
        return []
    most = report.totals[0]
    return [f"Among operators, {most.name} takes most: {format_percent(most.share, 0)} of the work."]


def _tera(rate: float | None) -> str:
    return "-" if rate is None else format_rate(rate / 1e12)


def _left_out(found: Sequence[object], count: int) -> str:
    return f" The first {len(found)} of {count:,}." if len(found) < count else ""


def _told(rows: list[dict[str, str]], *columns: str) -> list[Mapping[str, str]]:
    """Rows without those of the columns that hold nothing."""
    empty = {column for column in columns if all(row[column] == "-" for row in rows)}
    return [{key: value for key, value in row.items() if key not in empty} for row in rows]
