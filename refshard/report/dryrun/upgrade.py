"""A script dry-run in two environments: what differs, and where."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from refshard.analysis.exact import ORDER, Change, Value, changes
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.environments import Environment
from refshard.dryrun.exact import by_function, by_operator, differing, exact_figures
from refshard.errors import Status
from refshard.report.blocks import Answer, Block, Cell, Cover, Notes, Quantity, Row, Section, Text, Verdict, table
from refshard.report.dryrun.against import Against, against_section, signed_bytes, signed_seconds
from refshard.report.dryrun.answer import as_object, unanswered
from refshard.specs.gate import RULES, MetricRule

_SHOWN = 8
_RULES = {**RULES, "operator order": MetricRule(gates=False)}
"""Those of ``refshard gate``, but another order of the same operators is no regression."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One environment, and the dry run in it."""

    environment: Environment
    found: Analysis

    @property
    def trouble(self) -> str:
        """Why its figures cannot be compared."""
        answer = self.found.run.answer
        if answer.outcome == "failed":
            return f"the script failed: {answer.error}" + (f" at {answer.where}" if answer.where else "")
        why = unanswered(self.found)
        return "" if why is None else why[0]


def upgrade_answer(before: Side, after: Side, more: str = "") -> Answer:
    """All that differs. The status is 0 if no figure became worse, 1 if one did or the script no longer trains, 3 if it
    does not train ``before``. ``more`` is a line for the terminal.
    """
    request = before.found.run.request
    what = " ".join(("-m", *request.command) if request.module else request.command)
    where = f"rank {request.rank} of {request.world_size} on {request.cluster}"
    packages = _packages(before.environment, after.environment)
    comparable = not before.trouble and not after.trouble
    figures = [exact_figures(side.found) if comparable else {} for side in (before, after)]
    changed = changes({what: figures[0]}, {what: figures[1]}, _RULES)
    status, verdict = _verdict(before, after, changed)
    listed = [{"figure": c.metric, "before": c.before, "after": c.after, "verdict": c.verdict} for c in changed]
    return Answer(
        data={
            "status": status, "packages": packages, "changes": listed,
            "before": _as_object(before), "after": _as_object(after),
        },
        rows=listed,
        columns=("figure", "before", "after", "verdict"),
        blocks=[
            Text(text=f"upgrade check: {what}\n{where}", where="terminal"),
            *_tables(before, after, packages, changed),
            *([_modules(before, after)] if comparable else []),
            *([Text(text=more, where="terminal")] if more else []),
            verdict,
        ],
        status=status,
        cover=Cover(
            title=what, about=f"{where}, in two environments. The script ran on a fake GPU; nothing was computed.",
            fidelity="dry run",
        ),
    )  # fmt: skip


def _packages(before: Environment, after: Environment) -> dict[str, tuple[str | None, str | None]]:
    """The versions of distributions that differ."""
    versions = {
        name: (before.packages.get(name), after.packages.get(name)) for name in {*before.packages, *after.packages}
    }
    return {name: pair for name, pair in sorted(versions.items()) if pair[0] != pair[1]}


def _tables(
    before: Side, after: Side, packages: Mapping[str, tuple[str | None, str | None]], changed: Sequence[Change]
) -> Iterator[Block]:
    """What differs: packages, figures, and what accounts for these by function and by operator."""
    was_in, is_in = f"before: {before.environment.name}", f"after: {after.environment.name}"
    if packages:
        yield table([{"package": name, was_in: was, is_in: is_} for name, (was, is_) in packages.items()], left=3)
    else:
        yield Notes(sentences=["Both environments have the same packages, in the same versions."])
    if not changed:
        return
    yield table([
        {"figure": c.metric, was_in: _cell(c.metric, c.before), is_in: _cell(c.metric, c.after),
         "difference": _difference(c), "verdict": c.verdict}
        for c in changed
    ])  # fmt: skip
    for named, counted, of, caption in (
        ("function", "host waits", by_function,
         "Functions that allocated what is in memory at the peak, and in which the host waits for the GPU"),
        ("operator", "launches", by_operator, "Operators: bytes at the peak that they made, and launches in a step"),
    ):  # fmt: skip
        rows: list[Row] = [
            {named: name, "at the peak": Quantity(was[0], "B"), "after": Quantity(is_[0], "B"),
             counted: was[1], f"{counted} after": is_[1]}
            for name, was, is_ in differing(
                of(before.found), of(after.found), (0, 0),
                lambda was, is_: (abs(is_[0] - was[0]), abs(is_[1] - was[1])),
            )
        ]  # fmt: skip
        if rows:
            yield table(rows[:_SHOWN], caption=caption)


def _modules(before: Side, after: Side) -> Section:
    names = (after.environment.name, before.environment.name)
    return against_section(after.found, Against(varied="environment", names=names, other=before.found))


def _verdict(before: Side, after: Side, changed: Sequence[Change]) -> tuple[int, Verdict]:
    """The exit status, and the sentences that say why."""
    if before.trouble:
        return Status.NO_VERDICT, Verdict(
            sentences=[f"NO VERDICT: with {before.environment.name}, {before.trouble}"], style="doubtful"
        )
    if after.trouble:
        return 1, Verdict(sentences=[f"REGRESSION: with {after.environment.name}, {after.trouble}"], style="bad")
    listed = {
        verdict: ", ".join(f"{c.metric} {_difference(c)}" for c in changed if c.verdict == verdict)
        for verdict in ("regressed", "improved")
    }
    better = [f"Better: {listed['improved']}"] if listed["improved"] else []
    if worse := listed["regressed"]:
        return 1, Verdict(sentences=[f"REGRESSION with {after.environment.name}: {worse}", *better], style="bad")
    same = "no figure became worse" if changed else "no figure differs"
    return 0, Verdict(sentences=[f"PASS: {same} with {after.environment.name}", *better], style="good")


def _cell(figure: str, value: Value | None) -> Cell:
    if value is None or isinstance(value, str):
        return value
    if figure.endswith("time"):
        return Quantity(value, "s")
    return Quantity(value, "B") if _in_bytes(figure) else int(value)


def _difference(change: Change) -> str:
    """With its sign; of words, both."""
    was, is_ = change.before or 0, change.after or 0
    if isinstance(was, str) or isinstance(is_, str):
        return "another" if change.metric == ORDER else f"{was} to {is_}"
    if change.metric.endswith("time"):
        return f"{signed_seconds(is_ - was)} ({100 * (is_ - was) / was:+.1f} %)" if was else signed_seconds(is_)
    return signed_bytes(is_ - was) if _in_bytes(change.metric) else f"{is_ - was:+,}"


def _in_bytes(figure: str) -> bool:
    return figure.startswith("peak ") or figure.endswith(" bytes")


def _as_object(side: Side) -> dict[str, Any]:
    """Everything of one side, with what accounts for it."""
    return {
        "environment": msgspec.to_builtins(side.environment), "trouble": side.trouble, **as_object(side.found),
        "operators": by_operator(side.found), "functions": by_function(side.found),
    }  # fmt: skip
