"""What a dry run got wrong, beside the real trace of the same job."""

from collections.abc import Sequence

import msgspec

from refshard.analysis.attribution import IDLE
from refshard.analysis.difference import Change, Difference
from refshard.analysis.names import work_in_words
from refshard.analysis.prediction import HOST, Part, part_of, parts
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Answer, Block, Cover, Notes, Row, Table, Text, Verdict, table
from refshard.report.trace.difference import Compared, flat, not_alike, signed
from refshard.report.trace.sides import side_by_side
from refshard.report.trace.text import counted, cut, ns

_SHOWN, _LONGEST, _NAMED = 15, 60, 3
_SMALL = 0.1
"""Parts with less than this share of the largest error are not in the verdict."""
_LAUNCH_BOUND = 0.05
"""A larger share of a real step in which the GPU waits for the host needs a word about profilers."""


def prediction_answer(found: Compared, more: str = "") -> Answer:
    """Where the predicted step (B) differs from the real one (A): by kind of time, then by operator.

    ``more`` is printed below the verdict.
    """
    whole, of_step, lead = found.difference, parts(found.difference), verdict(found)
    data = {
        "verdict": lead, "unlike": msgspec.to_builtins(found.unlike), "prediction": msgspec.to_builtins(of_step),
        **msgspec.to_builtins(whole),
    }  # fmt: skip
    sides = [
        f"{name}: {path}, {counted(steps, 'step')} of {format_ns(mean)}"
        for name, path, steps, mean in zip(
            ("real (A)", "predicted (B)"), found.names, found.steps, (whole.a_ns, whole.b_ns)
        )
    ]
    both = side_by_side(("real", "predicted"), found.sides) if all(found.sides) else []
    blocks: list[Block] = [
        Text(text="\n".join(sides)), Notes(sentences=not_alike(found)), *both,
        _by_part(of_step, whole.a_ns, whole.b_ns),
        _by_work(whole.changes), Notes(sentences=found.warnings),
        Verdict(sentences=lead), *([Text(text=more, where="terminal")] if more else []),
    ]  # fmt: skip
    rows = [{"part": part_of(change)[0], "constant": part_of(change)[1], **flat(change)} for change in whole.changes]
    return Answer(data=data, rows=rows, blocks=blocks, cover=Cover(title="A prediction and the real step"))


def verdict(found: Compared) -> list[str]:
    """How far the predicted step is off, which parts it comes from, and whether errors cancel."""
    whole, of_step = found.difference, parts(found.difference)
    off = whole.delta_ns / whole.a_ns if whole.a_ns else 0.0
    how = "exactly right" if not off else f"{format_percent(abs(off))} too {'long' if off > 0 else 'short'}"
    sentences = [
        f"The dry run predicts a step of {format_ns(whole.b_ns)}; the real one takes {format_ns(whole.a_ns)}: {how}."
    ]
    wrong = [part for part in of_step if part.error_ns and abs(part.error_ns) >= _SMALL * abs(of_step[0].error_ns)]
    if wrong:
        named = [f"{part.name} {signed(part.error_ns)}{_governed(part.constant)}" for part in wrong[:_NAMED]]
        sentences.append(f"It is most wrong about {', '.join(named)}.")
    sentences += _without_host(of_step, whole)
    total = sum(abs(part.error_ns) for part in of_step)
    if whole.a_ns and total > 2 * abs(whole.delta_ns):
        sentences.append(f"Errors cancel: those of all parts are {format_percent(total / whole.a_ns)} of the step.")
    return sentences


def _governed(constant: str) -> str:
    return f" ({constant})" if constant else ""


def _without_host(of_step: Sequence[Part], whole: Difference) -> list[str]:
    """What is left of the error without the waits for the host, if there are many in the real step."""
    host = [part for part in of_step if part.constant == HOST]
    real, predicted = whole.a_ns - sum(p.real_ns for p in host), whole.b_ns - sum(p.predicted_ns for p in host)
    if real >= (1 - _LAUNCH_BOUND) * whole.a_ns:
        return []
    return [
        f"Without the GPU's waits for the host, {format_ns(predicted)} are predicted of {format_ns(real)} "
        f"({format_percent(predicted / real - 1)}). A profiler slows the host down: judge {HOST} by a step without one."
    ]


def _cells(real: float, predicted: float, constant: str) -> Row:
    return {
        "real": ns(real), "predicted": ns(predicted), "error": signed(predicted - real),
        "ratio": f"{predicted / real:.2f}" if real else "-", "governed by": constant,
    }  # fmt: skip


def _by_part(of_step: Sequence[Part], real: float, predicted: float) -> Table:
    rows: list[Row] = [{"kind of time": p.name, **_cells(p.real_ns, p.predicted_ns, p.constant)} for p in of_step]
    rows.append({"kind of time": "step", **_cells(real, predicted, "")})
    title = "What the prediction got wrong, per step; the last column names the number in the cluster's profile"
    caption = (
        "To correct it, multiply an efficiency or a rate by the ratio (predicted / real), and divide seconds by it"
    )
    return table(rows, text=("governed by",), title=title, caption=caption)


def _by_work(changes: Sequence[Change]) -> Table:
    rows: list[Row] = [
        {
            "operator": _label(one), "module": (one.work.unit or "").strip("()"),
            "kernels": f"{one.a_count:,.0f} / {one.b_count:,.0f}",
            **_cells(one.a_ns, one.b_ns, part_of(one)[1]),
        }
        for one in changes if one.work.kind != IDLE and one.delta_ns
    ]  # fmt: skip
    title = "The operators with the largest errors, per step; kernels are real / predicted"
    return table(rows, left=2, text=("governed by",), title=title, shown=_SHOWN)


def _label(one: Change) -> str:
    dims, dtype = (text.partition(" -> ")[0] for text in (one.work.dims, one.work.dtype))
    text = work_in_words(one.work.operator, dims, dtype)
    mark = " [only predicted]" if one.new else " [only real]" if one.gone else ""
    return cut(text, _LONGEST - len(mark), middle=True) + mark
