"""Published results of the same configuration as cases of a run."""

from dataclasses import dataclass

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.estimate.published import Published as Run
from refshard.estimate.published import load_runs
from refshard.quantities import format_seconds
from refshard.specs.case import REFERENCE_STRATEGY, spelled
from refshard.specs.published_parallel import load_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row for each pair of a case and a published result, and a sentence on how to read them."""

    sentence: str
    sources: tuple[str, ...]
    table: pd.DataFrame
    cases: tuple[CaseResult, ...]


def published(evidence: Evidence) -> Published:
    """Model, ranks, sequences per rank, tokens, checkpointed layers and eager execution must be the same."""
    runs, _ = load_runs()
    found = [
        (case, run)
        for case in evidence.cases
        if case.ok and case.strategy != REFERENCE_STRATEGY and case.metrics["step_time_s"]
        for run in runs
        if _same(case, run)
    ]
    if not found:
        told = f"No case has the configuration of one of {len(runs)} published runs."
    else:
        told = (
            "The same model, ranks, tokens and checkpointing. Hardware, dtype and versions differ, so a ratio is only "
            "a rough guide."
        )
    sources = {name: table.source for name, table in load_parallel().items()}
    return Published(
        sentence=told,
        sources=tuple(dict.fromkeys(sources[run.table] for _, run in found)),
        table=pd.DataFrame([_row(*one) for one in found]),
        cases=tuple(case for case, _ in found),
    )


def _same(case: CaseResult, run: Run) -> bool:
    spec, configuration = case.spec, run.configuration
    if spec.workload != "training" or spec.microbatches * spec.replicas * spec.data_ranks != spec.world_size:
        return False
    if configuration.compiled or configuration.microbatches > 1 or run.run.layers:
        return False
    return (run.run.model, run.seq_len, configuration.global_batch, configuration.world_size) == (
        spec.model, spec.seq_len, spec.global_batch, spec.world_size
    ) and _policy(configuration.checkpointing) == spec.checkpointing  # fmt: skip


def _policy(checkpointing: str) -> str | tuple[int, ...]:
    """As a case has it; a number of layers is that many from the first."""
    return tuple(range(int(checkpointing))) if checkpointing.isdecimal() else checkpointing


def _row(case: CaseResult, run: Run) -> dict[str, str]:
    time = case.metrics["step_time_s"] or 0.0
    return {
        "case": case.full_label,
        "fidelity": spelled(case.fidelity),
        "ours": format_seconds(time),
        "our hardware": case.spec.cluster or case.launches[0].device,
        "our dtype": case.spec.precision,
        "published": f"{run.run.strategy or run.configuration.strategy}: {format_seconds(run.seconds)}",
        "its hardware": run.cluster_name,
        "its dtype": run.configuration.precision,
        "our speed / published": f"{run.seconds / time:.2f}",
    }
