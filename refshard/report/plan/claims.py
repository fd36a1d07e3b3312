"""Published claims beside predicted ratios: a table and an object."""

from collections.abc import Sequence
from typing import Any

from refshard.estimate.claims import PredictedClaim, Side
from refshard.report.blocks import Column, Table
from refshard.specs.published_claims import Figure, figure_of

_COLUMNS = (
    Column("claim, and its setting", "left"),
    Column("figure", "left"),
    Column("published"),
    Column("predicted"),
    Column("cause of the difference", "left", wraps=True),
)


def claims_table(found: Sequence[PredictedClaim]) -> Table:
    """One row a claim; one that is not predicted says what is missing."""
    return Table(title="Headline claims", columns=_COLUMNS, rows=[_row(one) for one in found])


def _row(one: PredictedClaim) -> list[str]:
    claim = one.claim
    cause = f"Not predicted: {claim.missing}." if one.ratio is None else claim.cause
    predicted_change = "" if one.ratio is None else _change(one.ratio)
    return [f"{claim.name}\n{setting(one)}", claim.figure, _change(claim.ratio), predicted_change, cause]


def setting(one: PredictedClaim) -> str:
    """What both runs share, in words."""
    if one.claimed is None or one.baseline is None:
        return one.claim.setting or "not stated"
    run, configuration = one.claimed.published.run, one.claimed.published.configuration
    sizes = [("TP", configuration.tensor), ("CP", configuration.context), ("PP", configuration.pipeline)]
    axes = [f"{name} {size}" for name, size in sizes if size > 1]
    return ", ".join([run.model, f"{run.gpus:,} GPUs", *axes, f"{one.claimed.published.seq_len:,} tokens"])


def claim_as_object(one: PredictedClaim) -> dict[str, Any]:
    """One claim, with both runs; ratios are of the claimed run over the baseline."""
    claim = one.claim
    return {
        "table": one.table, "source": one.source, "claim": claim.name, "figure": claim.figure, "setting": setting(one),
        "published_ratio": claim.ratio, "predicted_ratio": one.ratio,
        "claimed": _side(claim.figure, one.claimed), "baseline": _side(claim.figure, one.baseline),
        "missing": claim.missing, "cause": claim.cause,
    }  # fmt: skip


def _side(figure: Figure, side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    run, configuration = side.published.run, side.published.configuration
    return {
        "strategy": configuration.strategy, "gpus": run.gpus, "published": figure_of(run, figure),
        "predicted": side.figure(figure), "published_s": side.published.seconds, "predicted_s": side.seconds,
        "predicted_allocated_gib": side.allocated_gib,
    }  # fmt: skip


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
