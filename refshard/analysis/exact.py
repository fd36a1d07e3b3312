"""Metrics that must not vary between two runs of the same code, compared without statistics.

They gate without a GPU and without noise: one launch is enough. A change here is real, also for the better, and
somebody has to accept it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

from refshard.analysis.gate import Verdict
from refshard.records import LaunchRecord
from refshard.specs.gate import Direction, MetricRule

Value = int | float | str
_DRY_PEAKS = {
    "peak allocated": "peak_memory_bytes", "peak active": "peak_active_bytes", "peak reserved": "peak_reserved_bytes",
}  # fmt: skip
Exact = Mapping[str, Value]
"""Exact metrics of one case, by name."""
OPERATORS, ORDER, PEAK = "operators", "operator order", "peak memory"
OF_THE_MACHINE = frozenset({"last loss", "losses", "parameters", PEAK})
"""Metrics that depend on the processor: sums of floats in another order, memory in other pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric of one case that changed; None where it does not exist."""

    case: str
    metric: str
    before: Value | None
    after: Value | None
    verdict: Verdict


def exact_metrics(record: LaunchRecord) -> dict[str, Value]:
    """The exact metrics of one launch.

    Number and bytes of each kind of collective per rank and step, FLOPs per token, operators of a step, their order
    and what they allocate, all losses and the final parameters to the bit; and the measured peak of memory, which
    varies by some KiB with the moment at which threads allocate. Of a dry run, the allocator's peaks, and how often
    the host waits for the device: they repeat to the bit on any machine.

    Raises:
        ValueError: the launch did not end ok.
    """
    proof = record.proof
    if proof is None:
        raise ValueError(f"{record.case.name}: ended {record.state}, so nothing of it is exact; it must end ok")
    found: dict[str, Value] = {}
    for collective in proof.traced:
        found[f"{collective.op} count"] = collective.count
        found[f"{collective.op} bytes"] = collective.bytes
    if record.flops_per_token is not None:
        found["FLOPs per token"] = record.flops_per_token
    if (census := record.census) is not None:
        found |= {
            OPERATORS: census.operators,
            ORDER: census.order_sha256[:16],
            "allocations": census.allocations,
            "allocated memory": census.allocated_bytes,
        }
    if record.case.protocol.fidelity == "dryrun":
        peaks = {name: record.metrics.get(metric) for name, metric in _DRY_PEAKS.items()}
        found |= {name: int(peak) for name, peak in peaks.items() if peak is not None}
        if record.census is not None and record.census.stream_waits is not None:
            found["stream waits"] = record.census.stream_waits
        if record.host_waits is not None:
            found["host synchronisations"] = sum(record.host_waits.values())
        return found
    if record.case.protocol.fidelity == "measured":
        found["last loss"] = record.losses[-1]
        found["losses"] = hashlib.sha256(msgspec.json.encode(record.losses)).hexdigest()[:16]
        found["parameters"] = proof.parameters_sha256[:16]
    if (peak := record.metrics.get("peak_memory_bytes")) is not None:
        found[PEAK] = int(peak)
    return found


def first_difference(before: Sequence[str], after: Sequence[str]) -> str:
    """The first operator in which two steps differ.

    >>> first_difference(["aten.mm", "aten.add"], ["aten.mm", "aten.clone", "aten.add"])
    'operator 2 is aten.clone and was aten.add'
    """
    pairs = enumerate(zip_longest(before, after, fillvalue="none"), start=1)
    place, was, is_ = next((place, was, is_) for place, (was, is_) in pairs if was != is_)
    return f"operator {place} is {is_} and was {was}"


def portable(metrics: Exact) -> dict[str, Value]:
    """The metrics that are the same on any machine with the same software."""
    return {metric: value for metric, value in metrics.items() if metric not in OF_THE_MACHINE}


def changes(
    before: Mapping[str, Exact], after: Mapping[str, Exact], rules: Mapping[str, MetricRule]
) -> tuple[Change, ...]:
    """What differs, by case and metric; a case only in ``after`` is new, one only in ``before`` is removed."""
    found: list[Change] = []
    for case in [*before, *(case for case in after if case not in before)]:
        if case not in after or case not in before:
            verdict: Verdict = "removed" if case in before else "new"
            found.append(Change(case=case, metric="", before=None, after=None, verdict=verdict))
            continue
        mine, theirs = before[case], after[case]
        for metric in [*mine, *(metric for metric in theirs if metric not in mine)]:
            if metric == ORDER and mine.get(OPERATORS) != theirs.get(OPERATORS):
                continue  # other operators have another order
            rule = rules.get(metric.rpartition(" ")[2] if metric not in rules else metric, MetricRule())
            was, is_ = mine.get(metric), theirs.get(metric)
            if was != is_ and not _within(was, is_, rule.tolerance):
                verdict = _verdict(metric, was, is_, rule.better) if rule.gates else "pass"
                found.append(Change(case=case, metric=metric, before=was, after=is_, verdict=verdict))
    return tuple(found)


def _within(was: Value | None, is_: Value | None, tolerance: float) -> bool:
    both = isinstance(was, int | float) and isinstance(is_, int | float)
    return both and abs(is_ - was) <= tolerance * abs(was)  # type: ignore[operator, arg-type]


def _verdict(metric: str, was: Value | None, is_: Value | None, better: Direction | None) -> Verdict:
    """A metric without a better direction has regressed if it changed at all. Missing collectives count as 0; any other
    metric is missing if another refshard measured. Words are in the alphabet's order: "no", "no answer", "yes".
    """
    if None in (was, is_) and not metric.endswith((" count", " bytes")):
        return "new" if was is None else "removed"
    if better is None or isinstance(was, str) != isinstance(is_, str):
        return "regressed"
    fewer = (is_ or 0) < (was or 0)  # type: ignore[operator]
    return "improved" if fewer == (better == "lower") else "regressed"
