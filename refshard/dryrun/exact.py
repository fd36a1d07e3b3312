"""What repeats to the bit in dry runs of the same code, on any machine: the figures that a gate compares."""

import hashlib
from collections import Counter

import numpy as np

from refshard.analysis.exact import Value
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import without_numbers
from refshard.dryrun.recording import Flag, Kind


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
    launched = (kinds == Kind.LAUNCH) & (recording.flags[rows] & Flag.HOST_ONLY == 0)
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


def by_module(found: Analysis) -> dict[str, tuple[int, int]]:
    """Operators of the last step, and bytes held at the peak, by module; layers that differ in their number are one."""
    recording = found.run.recording
    operators: Counter[str] = Counter()
    if found.step is not None:
        rows = slice(found.step.first, found.step.end)
        launched = (recording.kinds[rows] == Kind.LAUNCH) & (recording.flags[rows] & Flag.HOST_ONLY == 0)
        codes, counts = np.unique(recording.modules[rows][launched], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist()):
            operators[without_numbers(recording.module_table[code])] += count
    held: Counter[str] = Counter()
    for module, size in found.memory.by_module().items():
        held[without_numbers(module)] += size
    return {module: (operators[module], held[module]) for module in sorted({*operators, *held})}
