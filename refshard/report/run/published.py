"""Published results of the same configuration as cases of a run."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.quantities import format_rate, format_seconds
from refshard.specs.case import REFERENCE_STRATEGY, spelled
from refshard.specs.cluster import load_cluster
from refshard.specs.published import PublishedRow, PublishedTable, load_published


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row for each pair of a case and a published result, and a sentence on how to read them."""

    sentence: str
    sources: tuple[str, ...]
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]


def published(evidence: Evidence) -> Published:
    """Model, ranks, sequences per rank, tokens, checkpointed layers and eager execution must be the same."""
    tables = load_published()
    found = [
        (case, table, strategy, value)
        for case in evidence.cases
        if case.ok and case.strategy != REFERENCE_STRATEGY and case.metrics["step_time_s"]
        for table in tables.values()
        for row in _matching(case, table)
        for strategy, value in row.results.items()
    ]
    titles = " and ".join(table.title for table in tables.values())
    if not found:
        told = f"No case has the configuration of a published result ({titles})."
    else:
        told = (
            "The same model, ranks, tokens and checkpointing. Hardware, dtype and versions differ, so a ratio is only "
            "a rough guide."
        )
    return Published(
        sentence=told,
        sources=tuple(dict.fromkeys(table.source for _, table, _, _ in found)),
        table=pd.DataFrame([_row(*one) for one in found]),
        cases=tuple(case for case, _, _, _ in found),
    )


def _matching(case: CaseResult, table: PublishedTable) -> Iterator[PublishedRow]:
    spec = case.spec
    if spec.workload != "training" or spec.microbatches != 1 or spec.data_ranks // spec.replicas != spec.world_size:
        return
    for row in table.rows:
        same = (row.model, row.seq_len, row.sequences * spec.world_size) == (
            spec.model, spec.seq_len, spec.global_batch
        )  # fmt: skip
        if same and not row.compiled and _policy(row) == spec.checkpointing and _ranks(table, row) == spec.world_size:
            yield row


def _ranks(table: PublishedTable, row: PublishedRow) -> int:
    return load_cluster(table.cluster).of_nodes(row.nodes).world_size


def _policy(row: PublishedRow) -> str | tuple[int, ...]:
    """As a case has it; a number of layers is that many from the first."""
    if isinstance(row.checkpointing, str):
        return row.checkpointing
    return tuple(range(row.checkpointing)) if row.checkpointing else "none"


def _row(case: CaseResult, table: PublishedTable, strategy: str, value: float) -> dict[str, str]:
    rate, time = case.metrics["tokens_per_s_gpu"] or 0.0, case.metrics["step_time_s"] or 0.0
    seconds = table.unit == "seconds"
    speed = value / time if seconds else rate / value
    return {
        "case": case.full_label,
        "fidelity": spelled(case.fidelity),
        "ours": format_seconds(time) if seconds else f"{format_rate(rate)} tokens/s/GPU",
        "our hardware": case.spec.cluster or case.launches[0].device,
        "our dtype": case.spec.precision,
        "published": f"{strategy}: {format_seconds(value) if seconds else f'{format_rate(value)} tokens/s/GPU'}",
        "its hardware": table.cluster,
        "its dtype": "bf16",
        "our speed / published": f"{speed:.2f}",
    }
