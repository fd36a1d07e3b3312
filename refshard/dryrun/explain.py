"""What a real run held when memory ran out, and how that differs from a dry run of the same script.

Both know which line of the script allocated a block, so the dry run's module and purpose of a line also hold for the
real run's blocks of that line. A line differs if it holds more than its maximum over the dry run, so it does not matter
where in a step memory ran out.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.memory_peaks import blocks_of
from refshard.analysis.snapshot import (
    DeviceFigures,
    OomFigures,
    held_at_failure,
    read_snapshot,
    snapshot_figures,
)
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import categories, live_rows, without_numbers
from refshard.dryrun.recording import Category, Kind, Recording
from refshard.dryrun.steps import steps_of
from refshard.errors import TraceError
from refshard.events.pickles import is_pickle
from refshard.events.sites import Site

NO_LINE = ""
"""The line of what autograd's own thread allocates, and of blocks without a stack."""
_WORTH = 0.005
"""Part of what is held from which on a departure is named."""
_ALIKE = 0.02
_RELATED = 0.2
"""Part of what has a line that must be at lines of the dry run, or the snapshot is of another script."""
_WITHOUT_LINES = "nothing tells which lines allocated memory; call torch.cuda.memory._record_memory_history()"
_ALL = -1
"""In place of a size: all sizes."""
_Purpose = tuple[Category | None, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealRun:
    """The device of a snapshot that ran out of memory, else the one with most memory. ``held`` counts its blocks by
    line and size: those at the last failed allocation, in the end without one. ``settings`` are the allocator's.
    """

    name: str
    device: DeviceFigures
    held: Counter[tuple[Site | None, int]]
    settings: str

    @property
    def failed(self) -> OomFigures | None:
        """The last allocation that failed."""
        return self.device.history.ooms[-1] if self.device.history is not None and self.device.failure else None

    @property
    def may_hold_early(self) -> bool:
        """Whether it may hold blocks from before its history, which have no line."""
        return self.device.failure is None or self.device.failure.early_bytes > 0


def read_real_run(path: Path) -> RealRun:
    """Read a snapshot of a run.

    Raises:
        TraceError: it is no snapshot, damaged, or does not tell which lines allocated memory.
    """
    if path.is_file() and not is_pickle(path):
        raise TraceError(f"{path}: is no pickle; write a snapshot with torch.cuda.memory._dump_snapshot(FILE)")
    snapshot = read_snapshot(path)
    devices = snapshot_figures(snapshot)
    if not devices:
        raise TraceError(f"{path}: holds no memory of a GPU; take the snapshot in the process that uses the GPU")
    one = max(devices, key=lambda device: (device.failure is not None, device.fragmentation.reserved_bytes))
    held = held_at_failure(snapshot, one.device)
    if not any(line_of(site) for site, _ in held):
        lacking = "its history has no stacks" if one.history else "has no recorded history"
        when = "with its defaults" if one.history else "before the model is made"
        raise TraceError(f"{path}: {lacking}, so {_WITHOUT_LINES} {when}")
    settings = str(snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    return RealRun(name=path.name, device=one, held=held, settings=settings)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What the real run holds for one purpose in one module, layers merged, and what the dry run holds at its peak.
    ``category`` is None for lines that the dry run does not pass.
    """

    category: Category | None
    module: str
    bytes: int
    blocks: int
    predicted_bytes: int


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A ``line`` that holds ``bytes`` in ``blocks``, the largest of ``largest`` bytes, where the dry run has at most
    ``predicted_blocks`` at once, the largest of ``predicted_largest``: ``more`` blocks or ``larger`` ones, or a ``new``
    line that it does not pass. ``grows`` is how many more blocks it keeps in the dry run's last step than before.
    """

    kind: Literal["more", "larger", "new"]
    line: str
    category: Category | None
    module: str
    bytes: int
    blocks: int
    largest: int
    predicted_blocks: int = 0
    predicted_largest: int = 0
    grows: int = 0


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The real run's memory against the dry run's. ``matched`` is the part of what has a line that is at lines of the
    dry run; of another script, nothing is compared. The departures of most bytes come first; ``scale`` is the common
    factor of larger blocks, None without one. ``outside_bytes`` of the GPU are neither reserved nor free, which is
    negative if it has more memory than the cluster's; None where the snapshot does not tell.
    """

    held_bytes: int
    predicted_bytes: int
    matched: float
    parts: tuple[Part, ...]
    departures: tuple[Departure, ...]
    scale: float | None
    outside_bytes: int | None


def explain(real: RealRun, found: Analysis) -> Explanation:
    """Compare a real run with a dry run that recorded the lines of allocations."""
    dry = _Lines(found.run.recording)
    parts, of_line = defaultdict[_Purpose, Counter[str]](Counter), defaultdict[str, Counter[int]](Counter)
    for (site, size), count in real.held.items():
        line = line_of(site)
        of_line[line][size] += count
        unknown = not line and real.may_hold_early
        parts[(None, "") if unknown else dry.purpose(line, size)].update(bytes=size * count, blocks=count)
    sums = {line: sum(size * count for size, count in sizes.items()) for line, sizes in of_line.items()}
    total, predicted = sum(sums.values()), dry.at(found.memory.peak_at)
    matched = sum(n for line, n in sums.items() if line and line in dry.largest) / (total - sums.get(NO_LINE, 0))
    departures = [
        one
        for line, sizes in of_line.items()
        if line or not real.may_hold_early
        if (one := _departure(line, sizes, dry)) and _excess(one) > _WORTH * total
    ]
    compared = matched >= _RELATED
    oom = real.failed
    return Explanation(
        held_bytes=total, predicted_bytes=sum(predicted.values()), matched=matched, scale=_scale(departures),
        departures=tuple(sorted(departures, key=lambda one: -_excess(one))) if compared else (),
        parts=tuple(
            Part(category=key[0], module=key[1], bytes=parts[key]["bytes"], blocks=parts[key]["blocks"],
                 predicted_bytes=predicted[key])
            for key in sorted({*parts, *predicted}, key=lambda key: (-parts[key]["bytes"], -predicted[key]))
        ) if compared else (),
        outside_bytes=None if oom is None else (
            found.hardware.memory_bytes - oom.reserved_bytes - oom.device_free_bytes
        ),
    )  # fmt: skip


def line_of(site: Site | None) -> str:
    """A line as recordings write it, but without folders, which differ between machines."""
    if site is None or site.is_of_torch:
        return NO_LINE
    return f"{PurePath(site.file).name}:{site.line} in {site.function}"


def _departure(line: str, sizes: Counter[int], dry: "_Lines") -> Departure | None:
    blocks, largest = sizes.total(), max(sizes)
    category, module = dry.purpose(line, sizes.most_common(1)[0][0])
    found = Departure(
        kind="new", line=line, category=category, module=module, largest=largest, blocks=blocks,
        bytes=sum(size * count for size, count in sizes.items()),
    )  # fmt: skip
    if line not in dry.largest:
        return found
    found = msgspec.structs.replace(
        found, predicted_blocks=dry.most[line, _ALL], predicted_largest=dry.largest[line], grows=dry.grows(line)
    )
    if blocks <= found.predicted_blocks:
        return msgspec.structs.replace(found, kind="larger") if largest > found.predicted_largest else None
    # The size that most of them are too many of, if the dry run has that size at all.
    too_many = {size: (count - dry.most[line, size]) * size for size, count in sizes.items() if dry.most[line, size]}
    size = max(too_many, key=lambda size: too_many[size], default=_ALL)
    if too_many.get(size, 0) <= 0:
        return msgspec.structs.replace(found, kind="more")
    category, module = dry.purpose(line, size)
    return msgspec.structs.replace(
        found, kind="more", category=category, module=module, bytes=size * sizes[size], blocks=sizes[size],
        largest=size, predicted_blocks=dry.most[line, size],
    )  # fmt: skip


def _excess(one: Departure) -> float:
    """Bytes over what the dry run would hold in as many blocks, or in blocks as large."""
    if one.kind == "more":
        return one.bytes * (1 - one.predicted_blocks / one.blocks)
    return one.bytes * (1 - one.predicted_largest / one.largest)


def _scale(departures: list[Departure]) -> float | None:
    """The factor by which most bytes of larger blocks are larger."""
    factors = Counter[float]()
    for one in departures:
        if one.kind == "larger":
            factors[float(f"{one.largest / one.predicted_largest:.3g}")] += one.bytes
    return factors.most_common(1)[0][0] if factors else None


def scaled(explanation: Explanation) -> tuple[Departure, ...]:
    """The lines with blocks that are larger by the common factor."""
    scale = explanation.scale or 0
    return tuple(
        one
        for one in explanation.departures
        if one.kind == "larger" and abs(one.largest / one.predicted_largest - scale) <= _ALIKE * scale
    )


class _Lines:
    """What a dry run's lines hold: ``most`` blocks of a size at once (:data:`_ALL`: of all), and the ``largest``."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        kinds = recording.kinds
        pairs = blocks_of((kinds == Kind.ALLOCATE).astype(np.int64) - (kinds == Kind.FREE), recording.subjects)
        self._made, self._freed = pairs.made, np.minimum(pairs.freed, len(recording))
        table = [_without_folders(site) for site in recording.site_table]
        lines = list(dict.fromkeys(table))
        codes = np.array([lines.index(line) for line in table])[recording.sites[self._made]]
        self._lines = dict(zip(lines, range(len(lines))))
        self._codes, sizes = codes, recording.writes[self._made]
        kinds_of_block, which = np.unique(np.stack((codes, sizes)), axis=1, return_inverse=True)
        self.most = Counter({(lines[code], _ALL): most for code, most in self._most_at_once(codes).items()})
        for kind, most in self._most_at_once(which.reshape(-1)).items():
            code, size = kinds_of_block[:, kind].tolist()
            self.most[lines[code], size] = most
        self.largest = {lines[code]: int(sizes[codes == code].max()) for code in set(codes.tolist())}
        self._purposes = self._by_line_and_size(codes, sizes)

    def purpose(self, line: str, size: int) -> _Purpose:
        """What blocks of a line are for most of the time: those of this size, if there are any."""
        exact, all_sizes = self._purposes.get((line, size)), self._purposes.get((line, _ALL))
        found = exact or all_sizes
        return found.most_common(1)[0][0] if found else (None, "")

    def at(self, event: int) -> Counter[_Purpose]:
        """Bytes after an event of the recording by purpose."""
        rows = live_rows(self._recording, event)
        sums = Counter[_Purpose]()
        for key, size in zip(self._keys(rows), self._recording.writes[rows].tolist()):
            sums[key] += size
        return sums

    def grows(self, line: str) -> int:
        """How many blocks more a line holds at the end of the last step than of the one before."""
        mine = self._codes == self._lines[line]
        ends = [step.end - 1 for step in steps_of(self._recording, "step")[-2:]]
        held = [int((mine & (self._made < end) & (self._freed > end)).sum()) for end in ends]
        return max(held[-1] - held[0], 0) if held else 0

    def _most_at_once(self, keys: npt.NDArray[np.int64]) -> dict[int, int]:
        """Most blocks of each key that lived at one time."""
        if not len(keys):
            return {}
        keys, changes = np.tile(keys, 2), np.repeat((1, -1), len(keys))
        order = np.lexsort((np.concatenate((self._made, self._freed)), keys))
        keys = keys[order]
        # All of a key's blocks are freed, in the end at the latest, so that each key begins with none.
        counts, first = np.cumsum(changes[order]), np.flatnonzero(np.diff(keys, prepend=-1))
        return dict(zip(keys[first].tolist(), np.maximum.reduceat(counts, first).tolist()))

    def _by_line_and_size(
        self, codes: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> dict[tuple[str, int], Counter[_Purpose]]:
        """Bytes times events that they last."""
        lines, found = list(self._lines), defaultdict[tuple[str, int], Counter[_Purpose]](Counter)
        lasting = sizes * (self._freed - self._made)
        for code, size, key, weight in zip(codes.tolist(), sizes.tolist(), self._keys(self._made), lasting.tolist()):
            found[lines[code], size][key] += weight
            found[lines[code], _ALL][key] += weight
        return dict(found)

    def _keys(self, rows: npt.NDArray[np.int64]) -> list[_Purpose]:
        recording = self._recording
        modules = [without_numbers(module) for module in recording.module_table]
        codes = zip(categories(recording, rows).tolist(), recording.modules[rows].tolist())
        return [(Category(category), modules[module]) for category, module in codes]


def _without_folders(site: str) -> str:
    place, _, function = site.rpartition(" in ")
    return f"{PurePath(place).name} in {function}" if site else NO_LINE
