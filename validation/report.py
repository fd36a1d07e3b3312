"""Predictions beside published figures and those of real GPUs, as answers of ``refshard validate``."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from refshard.errors import SpecError
from refshard.quantities import format_percent, format_seconds
from refshard.report.blocks import Answer, Column, Notes, Table, Verdict, table
from validation.closed_form import Predicted, PredictedClaim, load_runs, predicted, predicted_claims
from validation.dry_runs import Compared, Prediction, RecordedCase, caveats, predict_all, recorded_cases
from validation.schema import HALVES, Figure, Run, load_sources, read_source, scripted_runs

_CLAIM_COLUMNS = (
    Column("claim, and its setting", "left"),
    Column("figure", "left"),
    Column("published"),
    Column("predicted"),
    Column("cause of the difference", "left", wraps=True),
)
_AGREES = 0.002
"""The relative error up to which a figure counts as that of an allocator mode."""
Curve = tuple[Predicted, Predicted, float, float]
"""The smallest and the largest run of a setting, and the published and predicted fraction of a GPU's speed that is lost
between them."""


def answer(*, fidelity: str, only: str | None = None, published: Path | None = None) -> Answer:
    """Predictions beside every published run and claim, or beside the table ``published`` of one's own.

    With the fidelity "dryrun", published runs beside dry runs, of those with ``only`` in their name; without it, also
    the recorded cases of real GPUs.

    Raises:
        SpecError: a value is wrong, or nothing can be predicted.
        RefshardError: the fake device cannot be made.
    """
    if fidelity == "dryrun":
        runs = scripted_runs()
        chosen = [one for name, one in runs.items() if only is None or only in name]
        if not chosen:
            raise SpecError(f"only: no published run's name holds '{only}'; choose from: {', '.join(runs)}")
        return dry_run_answer(predict_all(chosen), recorded_cases() if only is None else ())
    sources = load_sources() if published is None else {published.stem: read_source(published)}
    found, left = load_runs(sources)
    if not found:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in left))
        raise SpecError(f"published: no run of {published} can be predicted: {reasons}; complete the table")
    return closed_form_answer(predicted(found), left, predicted_claims() if published is None else ())


def closed_form_answer(
    found: Sequence[Predicted], left: Mapping[tuple[str, str], int], claims: Sequence[PredictedClaim] = ()
) -> Answer:
    """Tables by source, scaling, claims and, with ``--verbose``, each run.

    ``left`` counts runs that are not predicted, by table and reason.
    """
    curves = scaling(found)
    missing = [(*key, count) for key, count in sorted(left.items())]
    agreed, decided = speed_ups(found)
    held = sorted(abs(one.error) for one in found if one.published.half == "held out")
    notes = []
    if left:
        notes.append(
            f"{sum(left.values())} more runs are not predicted: their sources leave something out, or refshard has no "
            "model of them (-v lists the reasons)."
        )
    if decided:
        notes.append(
            f"YaFSDP's speed-ups over FSDP1 are predicted in the published order in {agreed} of {decided} pairs of "
            "settings."
        )
    if any(one.published.half == "fit" for one in found):
        notes.append("Constants were fitted on half of the settings (python -m validation.fit).")
    if years := by_half_year([(one.published.run, one.error) for one in found]):
        notes.append(f"Step time, bias by half-year of the release: {years}.")
    verdict = _verdict(found) or [f"No run was held out; median error of all {len(found)}: {_median(found)}."]
    tables = (
        _by_source(found), _scaling_by_source(curves), _own_predictions(found), claims_table(claims),
        _every_curve(curves), _every_run(found),
    )  # fmt: skip
    rows = [_as_object(one) for one in found]
    return Answer(
        data={
            "runs": rows,
            "not_predicted": [{"table": name, "reason": reason, "runs": count} for name, reason, count in missing],
            "held_out": {
                "runs": len(held), "median_error": median(held) if held else None,
                "worst_error": max(held, default=None),
            },
            "speed_ups_in_order": {"agreed": agreed, "pairs": decided},
            "claims": [claim_as_object(one) for one in claims],
        },
        rows=rows,
        blocks=[
            *(one for one in tables if one.rows),
            Notes(sentences=[f"Not predicted: {n} of {name}: {why}" for name, why, n in missing], where="detail"),
            Notes(sentences=notes),
            Verdict(sentences=verdict, style="plain"),
        ],
    )  # fmt: skip


def by_half_year(errors: Sequence[tuple[Run, float]]) -> str:
    """The median of the signed errors by half-year, of the runs with a known one; empty if they are all of one.

    A bias that grows from one to the next says that constants describe older software.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for run, error in errors:
        if run.half_year:
            groups[run.half_year].append(error)
    if len(groups) < 2:
        return ""
    return ", ".join(f"{name} {_signed(median(some))} ({len(some)} runs)" for name, some in sorted(groups.items()))


def _verdict(found: Sequence[Predicted]) -> list[str]:
    """Errors of the held-out runs, those of mixtures of experts apart."""
    groups = {
        "dense models": [one for one in found if one.published.model.experts is None],
        "mixtures of experts": [one for one in found if one.published.model.experts is not None],
    }
    sentences = []
    for name, members in groups.items():
        held = sorted(abs(one.error) for one in members if one.published.half == "held out")
        if held:
            sentences.append(
                f"Step time, {len(held)} held-out runs of {name}: median error {format_percent(median(held))}, 9 of 10 "
                f"within {format_percent(held[int(0.9 * (len(held) - 1))])}, worst {format_percent(held[-1])}."
            )
    return sentences


def _by_source(found: Sequence[Predicted]) -> Table:
    groups: dict[tuple[str, str, str], list[Predicted]] = defaultdict(list)
    for one in found:
        groups[one.published.table, one.published.run.hardware, one.published.job.precision].append(one)
    rows = []
    for (name, hardware, precision), members in groups.items():
        memory = [abs(error) for one in members if (error := one.memory_error) is not None]
        halves = {half: [one for one in members if one.published.half == half] for half in HALVES}
        rows.append({
            "source": name, "hardware": hardware, "precision": precision, "runs": str(len(members)),
            **{f"median error, {half}": _median(some) for half, some in halves.items()},
            "bias": _signed(median(one.error for one in members)),
            "worst": format_percent(max(abs(one.error) for one in members)),
            "memory": f"{format_percent(median(memory))}, worst {format_percent(max(memory))}" if memory else "",
        })  # fmt: skip
    return table(rows, left=3, title="Predicted step times against published ones")


def scaling(found: Sequence[Predicted]) -> list[Curve]:
    """Settings with a run on 64 GPUs or more, and one on a quarter of these or fewer."""
    groups: dict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for one in found:
        groups[(*one.published.setting, one.published.run.where)].append(one)
    curves = []
    for members in groups.values():
        first, last = (pick(members, key=lambda one: one.published.run.gpus) for pick in (min, max))
        if last.published.run.gpus >= max(64, 4 * first.published.run.gpus):
            batches = [one.published.job.global_batch / one.published.run.gpus for one in (first, last)]
            growth = batches[1] / batches[0]
            curves.append((
                first, last, 1 - growth * first.published.seconds / last.published.seconds,
                1 - growth * first.seconds / last.seconds,
            ))  # fmt: skip
    return curves


def _scaling_by_source(curves: Sequence[Curve]) -> Table:
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for first, _, published, predicted_loss in curves:
        groups[first.published.table].append((published, predicted_loss))
    rows = [
        {
            "source": name, "curves": str(len(members)),
            "median published loss": format_percent(median(published for published, _ in members)),
            "median predicted loss": format_percent(median(predicted_loss for _, predicted_loss in members)),
            "median difference": f"{100 * median(abs(b - a) for a, b in members):.1f} points",
            "within 5 points": str(sum(abs(b - a) <= 0.05 for a, b in members)),
        }
        for name, members in groups.items()
    ]  # fmt: skip
    return table(rows, title="Scaling loss per GPU")


def _every_curve(curves: Sequence[Curve]) -> Table:
    rows = [
        {
            "source": first.published.table, "model": first.published.run.model,
            "precision": first.published.job.precision,
            "GPUs": f"{first.published.run.gpus:,} to {last.published.run.gpus:,}",
            "published loss": format_percent(published), "predicted loss": format_percent(predicted_loss),
            "difference": f"{100 * (predicted_loss - published):+.1f} points",
        }
        for first, last, published, predicted_loss in curves
    ]  # fmt: skip
    return table(rows, left=3, title="Every curve", where="detail")


def _own_predictions(found: Sequence[Predicted]) -> Table:
    """Sources that predict their runs themselves, beside this project's predictions of the same runs."""
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for one in found:
        if one.source_error is not None:
            groups[one.published.table].append(one)
    rows = [
        {
            "source": name, "prediction": whose, "runs": str(len(errors)),
            "median error": format_percent(median(errors)), "worst": format_percent(max(errors)),
        }
        for name, members in groups.items()
        for whose, errors in (
            ("its own", [abs(one.source_error or 0) for one in members]),
            ("refshard", [abs(one.error) for one in members]),
            ("refshard, held out", [abs(one.error) for one in members if one.published.half == "held out"]),
        )
    ]  # fmt: skip
    return table(rows, left=2, title="Compared with the sources' own predictions")


def _every_run(found: Sequence[Predicted]) -> Table:
    rows = [
        {
            "source": one.published.table, "model": one.published.run.model, "GPUs": f"{one.published.run.gpus:,}",
            "tokens": f"{one.published.job.seq_len:,}", "strategy": one.published.job.strategy,
            "TP": str(one.published.run.tp), "PP": str(one.published.run.pp),
            "CP": str(one.published.run.cp), "published": format_seconds(one.published.seconds),
            "predicted": format_seconds(one.seconds), "error": _signed(one.error), "half": one.published.half,
            "release": one.published.run.where[:24],
        }
        for one in found
    ]  # fmt: skip
    return table(rows, left=2, title="Every run", where="detail")


def speed_ups(found: Sequence[Predicted]) -> tuple[int, int]:
    """Pairs of settings whose YaFSDP-over-FSDP1 speed-ups are predicted in the published order, and all pairs."""
    pairs: dict[tuple[object, ...], dict[str, Predicted]] = defaultdict(dict)
    for one in found:
        run = one.published.run
        if one.published.table == "yafsdp":
            pairs[run.model, run.gpus, run.seq_len][run.strategy] = one
    gains = [
        (of["fsdp1"].published.seconds / of["yafsdp"].published.seconds, of["fsdp1"].seconds / of["yafsdp"].seconds)
        for of in pairs.values()
    ]
    decided = [(a, b) for a, b in combinations(gains, 2) if a[0] != b[0]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in decided), len(decided)


def _as_object(one: Predicted) -> dict[str, Any]:
    run, job = one.published.run, one.published.job
    return {
        "table": one.published.table, "model": run.model, "hardware": run.hardware, "gpus": run.gpus,
        "seq_len": one.published.job.seq_len, "half": one.published.half, "strategy": job.strategy,
        "precision": job.precision, "tp": job.tp, "cp": job.cp,
        "pp": job.pp, "interleave": job.interleave, "dp_shard": job.dp_shard,
        "dp_replicate": job.dp_replicate, "microbatch": job.microbatch,
        "microbatches": job.microbatches, "checkpointing": job.checkpointing, "where": run.where,
        "published_s": one.published.seconds, "predicted_s": one.seconds, "error": one.error,
        "published_allocated_gib": run.allocated_gib, "predicted_allocated_gib": one.allocated_gib,
        "source_predicted_s": run.predicted_seconds,
    }  # fmt: skip


def claims_table(found: Sequence[PredictedClaim]) -> Table:
    """One row a claim; one that is not predicted says what is missing."""
    rows = []
    for one in found:
        claim, predicted_change, cause = one.claim, "", f"Not predicted: {one.claim.missing}."
        if one.ratio is not None:
            predicted_change, cause = _signed(one.ratio - 1), claim.cause
        rows.append([f"{claim.name}\n{setting(one)}", claim.figure, _signed(claim.ratio - 1), predicted_change, cause])
    return Table(title="Headline claims", columns=_CLAIM_COLUMNS, rows=rows)


def setting(one: PredictedClaim) -> str:
    """What both runs share."""
    if one.claimed is None:
        return one.claim.setting or "not stated"
    run = one.claimed.published.run
    axes = [f"{name} {size}" for name, size in (("TP", run.tp), ("CP", run.cp), ("PP", run.pp))]
    axes = [axis for axis in axes if not axis.endswith(" 1")]
    return ", ".join([run.model, f"{run.gpus:,} GPUs", *axes, f"{one.claimed.published.job.seq_len:,} tokens"])


def claim_as_object(one: PredictedClaim) -> dict[str, Any]:
    """One claim, with both runs; a ratio is the claimed run's figure over the baseline's."""
    claim = one.claim
    return {
        "table": one.table, "source": one.source, "claim": claim.name, "figure": claim.figure, "setting": setting(one),
        "published_ratio": claim.ratio, "predicted_ratio": one.ratio,
        "claimed": _side(claim.figure, one.claimed), "baseline": _side(claim.figure, one.baseline),
        "missing": claim.missing, "cause": claim.cause,
    }  # fmt: skip


def _side(figure: Figure, side: Predicted | None) -> dict[str, Any] | None:
    if side is None:
        return None
    run = side.published.run
    return {
        "strategy": side.published.job.strategy, "gpus": run.gpus, "published": run.printed(figure),
        "predicted": side.figure(figure), "published_s": side.published.seconds, "predicted_s": side.seconds,
        "predicted_allocated_gib": side.allocated_gib,
    }  # fmt: skip


def dry_run_answer(found: Sequence[Prediction], recorded: Sequence[RecordedCase] = ()) -> Answer:
    """A row for each figure, and the errors, apart for runs to which constants may be fitted.

    ``recorded`` cases have a table and errors of their own.
    """
    objects = [_prediction_object(one) for one in found]
    notes = [f"{one.published.run.name}: not reproduced: {one.refused}" for one in found if one.refused]
    notes += [f"{one.published.run.name}: {caveat}" for one in found for caveat in one.caveats]
    errors = {
        f"{label}, {half}": [
            figure.error
            for one in found if one.published.half == half
            for figure in one.compared if figure.is_memory is memory and figure.counts
        ]
        for label, memory in (("memory", True), ("tokens/s/GPU", False))
        for half in HALVES
    }  # fmt: skip
    for label, all_stated in (("memory, all settings stated", True), ("memory, some assumed", False)):
        errors[label] = [
            figure.error
            for one in found if one.published.run.states_all is all_stated
            for figure in one.compared if figure.is_memory and figure.counts
        ]  # fmt: skip
    for machine in dict.fromkeys(one.machine for one in recorded):
        cases = [one for one in recorded if one.machine == machine]
        errors[f"measured on {machine}, reserved memory"] = [one.error for one in cases if one.figure == "reserved"]
        for half in HALVES:
            errors[f"measured on {machine}, step time, {half}"] = [
                one.error for one in cases if one.figure == "step time" and one.half == half
            ]
    stated = sum(one.published.run.states_all for one in found)
    verdict = [f"{stated} of {len(found)} published runs state all settings that decide memory"] if found else []
    verdict += [f"{label}: {summary(some)}" for label, some in errors.items() if some]
    speeds = [
        (one.published.run, figure.error)
        for one in found for figure in one.compared if not figure.is_memory and figure.counts
    ]  # fmt: skip
    if years := by_half_year(speeds):
        verdict.append(f"tokens/s/GPU, bias by half-year: {years}")
    if unknown := [figure for one in found for figure in one.compared if not figure.counts]:
        verdict.append(_not_counted(unknown))
    heads = ("run", "figure", "published", "dry run", "error", "allocator mode")
    recorded_heads = ("measured on a GPU", "figure", "measured", "dry run", "error")
    return Answer(
        data={
            "verdict": verdict, "runs": objects,
            "recorded": [{**asdict(one), "error": one.error} for one in recorded],
        },
        rows=[{"name": one["name"], "half": one["half"], **figure} for one in objects for figure in one["compared"]],
        columns=("name", "half", "figure", "published", "predicted", "error", "mode", "other_mode"),
        blocks=[
            _table(heads, [_row(one, figure) for one in found for figure in one.compared]),
            Notes(sentences=notes),
            *([_table(recorded_heads, [_recorded_row(one) for one in recorded])] if recorded else []),
            Verdict(sentences=verdict),
        ],
    )  # fmt: skip


def summary(errors: Sequence[float]) -> str:
    """Median and worst of the absolute errors."""
    sizes = [abs(error) for error in errors]
    return f"{len(sizes)} figures, median error {median(sizes):.2%}, worst {max(sizes):.2%}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(
        columns=[Column(head, "left" if place < 2 else "right") for place, head in enumerate(heads)], rows=rows
    )


def _row(one: Prediction, figure: Compared) -> list[str]:
    form = "{:,.2f} GiB" if figure.is_memory else "{:,.0f}"
    cells = [f"{one.published.run.name} ({one.published.half})", figure.figure, form.format(figure.published)]
    if figure.counts:
        return [*cells, form.format(figure.predicted), f"{figure.error:+.2%}", _mode(figure)]
    both = sorted((figure.predicted, figure.other_mode or 0.0))
    errors = (f"{one / figure.published - 1:+.2%}" for one in both)
    return [*cells, f"{both[0]:,.2f} or {both[1]:,.2f} GiB", " or ".join(errors), _mode(figure)]


def _mode(figure: Compared) -> str:
    if not figure.is_memory:
        return ""
    return "not stated" if figure.other_mode is not None else "expandable" if figure.expandable else "default"


def _not_counted(unknown: Sequence[Compared]) -> str:
    nearer = [
        min(abs(one / figure.published - 1) for one in (figure.predicted, figure.other_mode or 0.0))
        for figure in unknown
    ]
    return (
        f"reserved memory, allocator mode not stated: {len(unknown)} figures, not counted; "
        f"{sum(error <= _AGREES for error in nearer)} are within {_AGREES:.1%} of one of the two modes, and the "
        f"worst is {max(nearer):.2%} off both"
    )


def _recorded_row(one: RecordedCase) -> list[str]:
    measured, predicted_value = (
        f"{value:,.2f} GiB" if one.figure == "reserved" else format_seconds(value)
        for value in (one.measured, one.predicted)
    )
    name = f"{one.machine}: {one.name}" + (f" ({one.half})" if one.figure == "step time" else "")
    return [name, one.figure, measured, predicted_value, f"{one.error:+.2%}"]


def _prediction_object(one: Prediction) -> dict[str, Any]:
    published, request = one.published, one.request
    return {
        "name": published.run.name, "half": published.half,
        "source": f"{published.source.source}: {published.source.title}", "refused": one.refused,
        "command": list(request.command) if request else [], "environment": request.environment if request else {},
        "caveats": caveats(published),
        "compared": [
            {
                "figure": figure.figure, "published": figure.published, "predicted": figure.predicted,
                "error": figure.error, "mode": _mode(figure), "other_mode": figure.other_mode,
            }
            for figure in one.compared
        ],
    }  # fmt: skip


def _median(members: Sequence[Predicted]) -> str:
    return format_percent(median(abs(one.error) for one in members)) if members else ""


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"
