"""Published runs, and cases measured on GPUs, beside their dry runs: as tables and as objects."""

from collections.abc import Sequence
from typing import Any

from refshard.dryrun.published import Compared, Errors, Prediction, caveats, errors_of
from refshard.dryrun.recorded import RecordedCase
from refshard.quantities import format_seconds
from refshard.report.blocks import Answer, Column, Notes, Table, Verdict


def dryrun_validation_answer(found: Sequence[Prediction], recorded: Sequence[RecordedCase] = ()) -> Answer:
    """A row for each figure, and what the errors come to, apart for rows that constants may be fitted on.

    ``recorded`` cases have a table and errors of their own.
    """
    heads = ["run", "figure", "published", "dry run", "error", "other allocator mode"]
    objects = validation_objects(found)
    rows = [{"name": one["name"], "half": one["half"], **figure} for one in objects for figure in one["compared"]]
    told = [*_errors(found), *_recorded_errors(recorded)]
    return Answer(
        data={"verdict": told, "runs": objects, "recorded": [_recorded_object(one) for one in recorded]},
        rows=rows,
        columns=("name", "half", "figure", "published", "predicted", "error", "other_mode"),
        blocks=[
            Table(
                columns=[Column(head, "left" if place < 2 else "right") for place, head in enumerate(heads)],
                rows=[_row(one, figure) for one in found for figure in one.compared],
            ),
            Notes(sentences=_caveats(found)),
            *([_recorded_table(recorded)] if recorded else []),
            Verdict(sentences=told),
        ],
    )


def _row(one: Prediction, figure: Compared) -> list[str]:
    unit = " GiB" if figure.is_memory else ""
    digits = 2 if figure.is_memory else 0
    other = "" if figure.other_mode is None else f"{figure.other_mode:,.2f} GiB ({_other_error(figure):+.1%})"
    return [
        f"{one.name} ({one.run.half})", figure.figure, f"{figure.published:,.{digits}f}{unit}",
        f"{figure.predicted:,.{digits}f}{unit}", f"{figure.error:+.2%}", other,
    ]  # fmt: skip


def _other_error(figure: Compared) -> float:
    assert figure.other_mode is not None
    return figure.other_mode / figure.published - 1


def _errors(found: Sequence[Prediction]) -> list[str]:
    told = []
    for words, memory in (("memory", True), ("tokens/s/GPU", False)):
        for half in ("fit", "held out"):
            chosen = [c for one in found if one.run.half == half for c in one.compared if c.is_memory is memory]
            if (errors := errors_of(chosen)) is not None:
                told.append(f"{words}, {half}: {_said(errors)}")
    return told


def _recorded_table(recorded: Sequence[RecordedCase]) -> Table:
    heads = ["measured on a GPU", "figure", "measured", "dry run", "error"]
    rows = []
    for one in recorded:
        measured, predicted = (
            f"{value:,.2f} GiB" if one.figure == "reserved" else format_seconds(value)
            for value in (one.measured, one.predicted)
        )
        name = f"{one.machine}: {one.name}" + (f" ({one.half})" if one.figure == "step time" else "")
        rows.append([name, one.figure, measured, predicted, f"{one.error:+.2%}"])
    return Table(
        columns=[Column(head, "left" if place < 2 else "right") for place, head in enumerate(heads)], rows=rows
    )


def _recorded_errors(recorded: Sequence[RecordedCase]) -> list[str]:
    """Of memory, to which nothing was fitted, and of both halves of step times."""
    told = []
    for machine in dict.fromkeys(one.machine for one in recorded):
        cases = [one for one in recorded if one.machine == machine]
        groups = {"reserved memory": [one for one in cases if one.figure == "reserved"]}
        for half in ("fit", "held out"):
            groups[f"step time, {half}"] = [one for one in cases if one.figure == "step time" and one.half == half]
        for words, group in groups.items():
            if (errors := errors_of(group)) is not None:
                told.append(f"measured on {machine}, {words}: {_said(errors)}")
    return told


def _recorded_object(one: RecordedCase) -> dict[str, Any]:
    return {
        "machine": one.machine, "name": one.name, "half": one.half, "figure": one.figure, "measured": one.measured,
        "predicted": one.predicted, "error": one.error,
    }  # fmt: skip


def _caveats(found: Sequence[Prediction]) -> list[str]:
    told = [f"{one.name}: not reproduced: {one.refused}" for one in found if one.refused]
    for one in found:
        told += [f"{one.name}: {caveat}" for caveat in one.caveats]
    return told


def _said(errors: Errors) -> str:
    return f"{errors.count} figures, median error {errors.median:.2%}, worst {errors.worst:.2%}"


def validation_objects(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """For ``--json``: an object for each run."""
    return [
        {
            "name": one.name, "half": one.run.half, "source": one.run.source, "refused": one.refused,
            "command": list(one.request.command) if one.request else [],
            "environment": one.request.environment if one.request else {},
            "caveats": caveats(one.run),
            "compared": [
                {
                    "figure": c.figure, "published": c.published, "predicted": c.predicted, "error": c.error,
                    "other_mode": c.other_mode,
                }
                for c in one.compared
            ],
        }
        for one in found
    ]  # fmt: skip
