"""What dry runs are compared by: figures that repeat to the bit on any machine, as a gate needs, and use by module."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from refshard.analysis.exact import Value
from refshard.dryrun.analyse import Analysis, kernels
from refshard.dryrun.memory import live_rows, without_numbers
from refshard.dryrun.recording import Kind


def exact_figures(found: Analysis) -> dict[str, Value]:
    """Of the last step: operators, their order, allocations, collectives and waits; of the run: the allocator's peaks.
    Times are modelled: they change with the code, and with refshard's model.
    """
    recording, peak = found.run.recording, found.run.answer.peak
    figures: dict[str, Value] = {"fits": {True: "yes", False: "no", None: "no answer"}[found.fits]}
    figures |= {"peak allocated": peak.allocated, "peak reserved": peak.reserved}
    if found.step is None:
        return figures
    rows = slice(found.step.first, found.step.end)
    kinds, names = recording.kinds[rows], recording.names[rows]
    launched = kernels(recording)[rows]
    order = "\n".join(recording.name_table[code] for code in names[launched].tolist())
    figures |= {
        "operators": int(launched.sum()),
        "operator order": hashlib.sha256(order.encode()).hexdigest()[:16],
        "allocations": int((kinds == Kind.ALLOCATE).sum()),
        "stream waits": int((kinds == Kind.WAIT).sum()),
        "host synchronisations": sum(one.count for one in found.synchronisations),
    }
    collectives = kinds == Kind.COLLECTIVE
    for code in sorted(set(names[collectives].tolist()), key=lambda code: recording.name_table[code]):
        some = collectives & (names == code)
        figures[f"{recording.name_table[code]} count"] = int(some.sum())
        figures[f"{recording.name_table[code]} bytes"] = int(recording.sizes[rows][some].sum())
    if found.step_s is not None and found.exposed_s is not None:
        figures |= {"step time": round(found.step_s, 6), "exposed communication time": round(found.exposed_s, 6)}
    return figures


class Use(NamedTuple):
    """What a module takes: operators of the last step, bytes at the peak, modelled seconds of the step's kernels."""

    operators: int
    peak_bytes: int
    device_s: float


def by_module(found: Analysis) -> dict[str, Use]:
    """Use by module; layers that differ in their number are one, and "" stands for what is outside of modules."""
    recording = found.run.recording
    operators, seconds = Counter[str](), Counter[str]()
    if found.step is not None:
        rows = slice(found.step.first, found.step.end)
        launched = kernels(recording)[rows]
        codes = recording.modules[rows][launched]
        sums = np.bincount(codes, weights=found.prices.seconds[rows][launched])
        for code, count in zip(*(column.tolist() for column in np.unique(codes, return_counts=True))):
            module = without_numbers(recording.module_table[code])
            operators[module] += count
            seconds[module] += sums[code]
    held: Counter[str] = Counter()
    for module, size in found.memory.by_module().items():
        held[without_numbers(module)] += size
    return {name: Use(operators[name], held[name], float(seconds[name])) for name in sorted({*operators, *held})}


def by_operator(found: Analysis) -> dict[str, tuple[int, int]]:
    """Bytes at the peak, and launches of the last step, by operator and module, as ``aten::mul in layers.*.mlp``."""
    recording = found.run.recording
    launches, held = Counter[str](), Counter[str]()

    def add(to: Counter[str], operator: str, module: str, count: int) -> None:
        to[f"{operator} in {without_numbers(module) or 'no module'}"] += count

    if found.step is not None:
        rows = slice(found.step.first, found.step.end)
        launched = kernels(recording)[rows]
        codes = np.stack([recording.names[rows][launched], recording.modules[rows][launched]])
        pairs, counts = np.unique(codes, axis=1, return_counts=True)
        for (name, module), count in zip(pairs.T.tolist(), counts.tolist()):
            add(launches, recording.name_table[name], recording.module_table[module], count)
    for one in found.memory.held:
        add(held, one.operator or f"empty ({one.category.name.lower()})", one.module, one.bytes)
    return {name: (held[name], launches[name]) for name in sorted({*launches, *held})}


def by_function(found: Analysis) -> dict[str, tuple[int, int]]:
    """Bytes at the peak that a function of the script or of its libraries allocated, where the request has ``sites``,
    and how often the host waits for the GPU there in the last step. Lines move from version to version.
    """
    recording, held, waits = found.run.recording, Counter[str](), Counter[str]()
    for row in live_rows(recording, found.memory.peak_at).tolist():
        held[_function(recording.site_table[recording.sites[row]])] += int(recording.sizes[row])
    for one in found.synchronisations:
        waits[_function(one.site)] += one.count
    return {name: (held[name], waits[name]) for name in sorted({*held, *waits})}


def _function(site: str) -> str:
    """``a.py:7 in f`` as ``a.py in f``."""
    return re.sub(r":[0-9]+ in ", " in ", site) or "torch, in backward"


Figures = TypeVar("Figures", bound=tuple[float, ...])


def differing(
    before: Mapping[str, Figures], now: Mapping[str, Figures], none: Figures, size: Callable[[Figures, Figures], Any]
) -> list[tuple[str, Figures, Figures]]:
    """The modules whose figures differ, with both (``none`` of one that is missing); the largest by ``size`` first."""
    pairs = ((name, before.get(name, none), now.get(name, none)) for name in sorted({*before, *now}))
    return sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: size(*pair[1:]), reverse=True)
