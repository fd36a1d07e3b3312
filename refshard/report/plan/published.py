"""Predictions of published runs beside their figures: by source, by setting, scaling, and speed-ups."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from refshard.estimate.claims import PredictedClaim
from refshard.estimate.published import Half, Published
from refshard.quantities import format_percent, format_seconds
from refshard.report.blocks import Answer, Notes, Table, Verdict, table
from refshard.report.plan.claims import claim_as_object, claims_table

HALVES: tuple[Half, ...] = ("fit", "held out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published run and its prediction: step time in seconds, peak of allocated memory in GiB."""

    published: Published
    seconds: float
    allocated_gib: float

    @property
    def error(self) -> float:
        """Of the step time, as a fraction: above 0 where the prediction is longer."""
        return self.seconds / self.published.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of the allocated memory; None where none is published."""
        published = self.published.run.allocated_gib
        return self.allocated_gib / published - 1 if published else None

    @property
    def source_error(self) -> float | None:
        """Of the source's own prediction; None where it has none."""
        predicted = self.published.run.predicted_seconds
        return predicted / self.published.seconds - 1 if predicted else None


def published_answer(
    found: Sequence[Compared], left: Mapping[tuple[str, str], int], claims: Sequence[PredictedClaim] = ()
) -> Answer:
    """Tables by source, scaling and speed-ups, and of claims; each run with ``--verbose``.

    ``left`` counts runs that are not predicted, by table and reason.
    """
    curves = scaling(found)
    blocks: list[Any] = [by_source(found), *_optional(scaling_by_source(curves)), *_optional(own_predictions(found))]
    blocks += [claims_table(claims)] if claims else []
    blocks += _optional(scaling_table(curves))
    blocks.append(_runs(found))
    return Answer(
        data={
            "runs": [as_object(one) for one in found], "not_predicted": _left(left), **_sums(found),
            "claims": [claim_as_object(one) for one in claims],
        },
        rows=[as_object(one) for one in found],
        blocks=[
            *blocks,
            Notes(sentences=not_predicted(left), where="detail"),
            Notes(sentences=notes(found, left)),
            Verdict(sentences=[verdict(found)], style="plain"),
        ],
    )  # fmt: skip


def verdict(found: Sequence[Compared]) -> str:
    """The errors of the half that constants were not fitted on."""
    errors = sorted(abs(one.error) for one in found if one.published.half == "held out")
    if not errors:
        return f"No run was held out; median error of all {len(found)}: {_median(found)}."
    ninth = errors[int(0.9 * (len(errors) - 1))]
    return (
        f"Step time, {len(errors)} held-out runs: median error {format_percent(median(errors))}, 9 of 10 within "
        f"{format_percent(ninth)}, worst {format_percent(errors[-1])}."
    )


def by_source(found: Sequence[Compared]) -> Table:
    """How far each source's runs are off, on each accelerator, in either half."""
    groups: dict[tuple[str, str, str], list[Compared]] = defaultdict(list)
    for one in found:
        groups[one.published.table, one.published.run.hardware, one.published.configuration.precision].append(one)
    rows = [
        {
            "source": name, "hardware": hardware, "precision": precision, "runs": str(len(members)),
            **{f"median error, {half}": _median([m for m in members if m.published.half == half]) for half in HALVES},
            "bias": _signed(median(m.error for m in members)),
            "worst": format_percent(max(abs(m.error) for m in members)),
            "memory": _memory(members),
        }
        for (name, hardware, precision), members in groups.items()
    ]  # fmt: skip
    return table(rows, left=3, title="Predicted step times against published ones")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A setting that was published at several sizes: its smallest and its largest run, and what part of a GPU's speed
    is lost between them.
    """

    first: Compared
    last: Compared
    published: float
    predicted: float


def scaling(found: Sequence[Compared]) -> list[Curve]:
    """Settings with a run on 64 GPUs or more, and one on a quarter of these or fewer."""
    groups: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for one in found:
        groups[(*one.published.setting, one.published.run.where)].append(one)
    curves = []
    for members in groups.values():
        first, last = (pick(members, key=lambda one: one.published.run.gpus) for pick in (min, max))
        if last.published.run.gpus < 4 * first.published.run.gpus or last.published.run.gpus < 64:
            continue
        published, predicted = (_loss(first, last, of) for of in ("published", "predicted"))
        curves.append(Curve(first=first, last=last, published=published, predicted=predicted))
    return curves


def scaling_by_source(curves: Sequence[Curve]) -> Table | None:
    """The losses of each source's settings: medians, and the largest difference."""
    groups: dict[str, list[Curve]] = defaultdict(list)
    for one in curves:
        groups[one.first.published.table].append(one)
    rows = [
        {
            "source": name, "curves": str(len(members)),
            "median published loss": format_percent(median(one.published for one in members)),
            "median predicted loss": format_percent(median(one.predicted for one in members)),
            "median difference": f"{100 * median(abs(one.predicted - one.published) for one in members):.1f} points",
            "within 5 points": str(sum(abs(one.predicted - one.published) <= 0.05 for one in members)),
        }
        for name, members in groups.items()
    ]  # fmt: skip
    return table(rows, title="Scaling loss per GPU") if rows else None


def scaling_table(curves: Sequence[Curve]) -> Table | None:
    """Every curve."""
    rows = []
    for one in curves:
        run, last = one.first.published.run, one.last
        rows.append({
            "source": one.first.published.table, "model": run.model,
            "precision": one.first.published.configuration.precision,
            "GPUs": f"{run.gpus:,} to {last.published.run.gpus:,}", "published loss": format_percent(one.published),
            "predicted loss": format_percent(one.predicted),
            "difference": f"{100 * (one.predicted - one.published):+.1f} points",
        })  # fmt: skip
    return table(rows, left=3, title="Every curve", where="detail") if rows else None


def _loss(first: Compared, last: Compared, of: str) -> float:
    def speed(one: Compared) -> float:
        seconds = one.published.seconds if of == "published" else one.seconds
        return one.published.configuration.global_batch / seconds / one.published.run.gpus

    return 1 - speed(last) / speed(first)


def own_predictions(found: Sequence[Compared]) -> Table | None:
    """Sources that predict their runs themselves, beside this project's predictions of the same runs."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for one in found:
        if one.source_error is not None:
            groups[one.published.table].append(one)
    rows = []
    for name, members in groups.items():
        for whose, errors in (
            ("its own", [abs(m.source_error) for m in members if m.source_error is not None]),
            ("refshard", [abs(m.error) for m in members]),
            ("refshard, held out", [abs(m.error) for m in members if m.published.half == "held out"]),
        ):
            rows.append({
                "source": name, "prediction": whose, "runs": str(len(errors)),
                "median error": format_percent(median(errors)), "worst": format_percent(max(errors)),
            })  # fmt: skip
    return table(rows, left=2, title="Compared with the sources' own predictions") if rows else None


def speed_ups(found: Sequence[Compared]) -> tuple[int, int]:
    """Of all pairs of settings that were published with both YaFSDP and FSDP1, how many have their speed-ups predicted
    in the published order, and how many there are.
    """
    pairs: dict[tuple[object, ...], dict[str, Compared]] = defaultdict(dict)
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


def not_predicted(left: Mapping[tuple[str, str], int]) -> list[str]:
    """Which runs are not predicted, and why."""
    return [f"Not predicted: {count} of {name}: {reason}" for (name, reason), count in sorted(left.items())]


def notes(found: Sequence[Compared], left: Mapping[tuple[str, str], int]) -> list[str]:
    """What the tables do not say."""
    more = sum(left.values())
    told = []
    if more:
        told.append(
            f"{more} more runs are not predicted: their sources leave something out, or refshard has no model of them "
            "(-v lists the reasons)."
        )
    agreed, decided = speed_ups(found)
    if decided:
        told.append(
            f"YaFSDP's speed-ups over FSDP1 are predicted in the published order in {agreed} of {decided} pairs of "
            "settings."
        )
    if any(one.published.half == "fit" for one in found):
        told.append("Constants were fitted on half of the settings (python profiles/published_parallel/fit.py).")
    return told


def as_object(one: Compared) -> dict[str, Any]:
    """One run, flat."""
    run, configuration = one.published.run, one.published.configuration
    return {
        "table": one.published.table, "model": run.model, "hardware": run.hardware, "gpus": run.gpus,
        "seq_len": one.published.seq_len, "half": one.published.half, "strategy": configuration.strategy,
        "precision": configuration.precision, "tensor": configuration.tensor, "context": configuration.context,
        "pipeline": configuration.pipeline, "interleave": configuration.interleave, "shard": configuration.shard,
        "replicate": configuration.replicate, "microbatch": configuration.microbatch,
        "microbatches": configuration.microbatches, "checkpointing": configuration.checkpointing, "where": run.where,
        "published_s": one.published.seconds, "predicted_s": one.seconds, "error": one.error,
        "published_allocated_gib": run.allocated_gib, "predicted_allocated_gib": one.allocated_gib,
        "source_predicted_s": run.predicted_seconds,
    }  # fmt: skip


def _runs(found: Sequence[Compared]) -> Table:
    rows = [
        {
            "source": one.published.table, "model": one.published.run.model, "GPUs": f"{one.published.run.gpus:,}",
            "tokens": f"{one.published.seq_len:,}", "strategy": one.published.configuration.strategy,
            "TP": str(one.published.configuration.tensor), "PP": str(one.published.configuration.pipeline),
            "CP": str(one.published.configuration.context), "published": format_seconds(one.published.seconds),
            "predicted": format_seconds(one.seconds), "error": _signed(one.error), "half": one.published.half,
            "release": one.published.run.where[:24],
        }
        for one in found
    ]  # fmt: skip
    return table(rows, left=2, title="Every run", where="detail")


def _sums(found: Sequence[Compared]) -> dict[str, Any]:
    agreed, decided = speed_ups(found)
    held = [abs(one.error) for one in found if one.published.half == "held out"]
    return {
        "held_out": {
            "runs": len(held), "median_error": median(held) if held else None, "worst_error": max(held, default=None),
        },
        "speed_ups_in_order": {"agreed": agreed, "pairs": decided},
    }  # fmt: skip


def _left(left: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    return [{"table": name, "reason": reason, "runs": count} for (name, reason), count in sorted(left.items())]


def _median(members: Sequence[Compared]) -> str:
    return format_percent(median(abs(one.error) for one in members)) if members else ""


def _memory(members: Sequence[Compared]) -> str:
    errors = [abs(error) for one in members if (error := one.memory_error) is not None]
    return f"{format_percent(median(errors))}, worst {format_percent(max(errors))}" if errors else ""


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"


def _optional(found: Table | None) -> list[Table]:
    return [] if found is None else [found]
