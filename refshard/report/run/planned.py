"""What a suite would launch, before anything is."""

from collections.abc import Sequence

from refshard.quantities import format_duration
from refshard.report.blocks import Answer, Table, Verdict, table
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec


def planned_answer(
    suite: SuiteSpec, cases: Sequence[CaseSpec], *, launches: int, seen_before: int, unknown: int, seconds: float
) -> Answer:
    """The suite's cases, and how long they will take, s: as ``seen_before``, else estimated; ``unknown`` ones not."""
    rows = [
        {
            "case": case.name, "hash": case.hash, "strategy": case.strategy, "model": case.model,
            "world_size": case.world_size, "global_batch": case.global_batch, "seq_len": case.seq_len,
            "fidelity": case.fidelity, "options": list(case.axes),
        }
        for case in cases
    ]  # fmt: skip
    told = _sentence(suite, launches, seen_before, unknown, seconds)
    return Answer(
        data={
            "suite": suite.name, "launches": launches, "expected_s": seconds if not unknown else None, "cases": rows,
        },
        rows=rows,
        blocks=[_table(suite, cases), Verdict(sentences=[told])],
    )  # fmt: skip


def _table(suite: SuiteSpec, cases: Sequence[CaseSpec]) -> Table:
    rows = [
        {
            "case": case.name, "strategy": case.strategy, "model": case.model, "options": ", ".join(case.axes),
            "ranks": f"{case.world_size:,}",
            "batch": f"{case.global_batch} x {case.seq_len:,}",
        }
        for case in cases
    ]  # fmt: skip
    about = f": {suite.about}" if suite.about else ""
    return table(rows, left=4, title=f"{suite.name}{about}")


def _sentence(suite: SuiteSpec, launches: int, seen_before: int, unknown: int, seconds: float) -> str:
    rounds = f" in {suite.most_rounds} rounds" if suite.most_rounds > 1 else ""
    told = f"{launches} {'launch' if launches == 1 else 'launches'}{rounds}"
    if unknown:
        return f"{told}; duration unknown for {unknown}: no similar launch is recorded."
    basis = "estimated from earlier launches" if seen_before == launches else "a rough estimate"
    return f"{told}, about {format_duration(seconds)} ({basis})."
