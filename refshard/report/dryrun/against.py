"""Two dry runs compared: their figures, and which modules account for the difference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.exact import Use, by_module, differing
from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.blocks import Notes, Quantity, Row, Section, table

_NONE = Use(0, 0, 0.0)
_SHOWN, _NAMED = 8, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Against:
    """The ``other`` dry run of a comparison; ``names`` are this one's and the other's, ``varied`` is what differs."""

    varied: str
    names: tuple[str, str]
    other: Analysis


def against_section(found: Analysis, against: Against) -> Section:
    """A table of both runs, one of the modules that differ, and the difference in sentences."""
    runs: list[Row] = [
        {against.varied: name, "peak reserved": Quantity(one.run.answer.peak.reserved, "B"),
         "peak allocated": Quantity(one.run.answer.peak.allocated, "B"),
         "step time": None if one.step_s is None else Quantity(one.step_s, "s"),
         "tokens/s/GPU": None if one.tokens_per_s is None else round(one.tokens_per_s)}
        for name, one in zip(against.names, (found, against.other))
    ]  # fmt: skip
    before, now = by_module(against.other), by_module(found)
    most = max((use.device_s for use in (*before.values(), *now.values())), default=0.0)
    largest = max((use.peak_bytes for use in (*before.values(), *now.values())), default=0)

    def size(was: Use, is_: Use) -> float:
        """The larger of the difference in memory and in time, each as a part of the largest module's."""
        return max(
            abs(is_.peak_bytes - was.peak_bytes) / max(largest, 1), abs(is_.device_s - was.device_s) / (most or 1.0)
        )

    modules: list[Row] = [
        {"module": name or "outside of modules",
         "at the peak": Quantity(is_.peak_bytes, "B"), "other's": Quantity(was.peak_bytes, "B"),
         "kernels": Quantity(is_.device_s, "s"), "other's kernels": Quantity(was.device_s, "s"),
         "operators": is_.operators, "other's operators": was.operators}
        for name, was, is_ in differing(before, now, _NONE, size)
    ]  # fmt: skip
    return Section(
        title=f"Compared with {against.names[1]}", id="against", nav="Compared",
        blocks=[
            table(runs, text=[against.varied]),
            *([table(modules[:_SHOWN], caption="Modules that differ most, in a step")] if modules else []),
            Notes(sentences=list(_sentences(found, against.other, before, now))),
        ],
    )  # fmt: skip


def _sentences(found: Analysis, other: Analysis, before: dict[str, Use], now: dict[str, Use]) -> Iterator[str]:
    reserved, others = (one.run.answer.peak.reserved for one in (found, other))
    of_memory = _accounts(before, now, "peak_bytes", signed_bytes)
    if reserved == others and not of_memory:
        yield "Memory: no difference."
    else:
        yield f"Peak reserved: {signed_bytes(reserved - others)}." + (
            f" At the peak of allocated memory: {of_memory}." if of_memory else ""
        )
    if found.step_s is None or other.step_s is None:
        return
    change, of_time = found.step_s - other.step_s, _accounts(before, now, "device_s", signed_seconds)
    share = f"{'+' if change > 0 else ''}{format_percent(change / other.step_s)}"
    yield f"Step time: {signed_seconds(change)} ({share})." + (f" Kernels: {of_time}." if of_time else "")


def _accounts(before: dict[str, Use], now: dict[str, Use], field: str, written: Callable[[float], str]) -> str:
    """The modules with the largest differences of a field, but for tiny ones."""
    pairs = differing(before, now, _NONE, lambda was, is_: abs(getattr(is_, field) - getattr(was, field)))
    changes = {name or "outside of modules": getattr(is_, field) - getattr(was, field) for name, was, is_ in pairs}
    least = 0.01 * sum(map(abs, changes.values()))
    return ", ".join(f"{name} {written(by)}" for name, by in [*changes.items()][:_NAMED] if abs(by) > least)


def signed_bytes(n: float) -> str:
    """A difference in bytes."""
    return ("+" if n > 0 else "-" if n < 0 else "") + format_bytes(abs(n))


def signed_seconds(s: float) -> str:
    """A difference in seconds."""
    return ("+" if s > 0 else "-" if s < 0 else "") + format_seconds(abs(s))
