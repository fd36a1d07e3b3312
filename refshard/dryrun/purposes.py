"""What each event of a recording is for: its unit, and the label under which a trace would show it.

Real traces have annotations. A recording has modules, phases and streams, which say as much: a kernel on a stream of
its own prepares or finishes the communication of that stream, or of a stream that waits for it.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import Flag, Kind, Phase, Recording
from refshard.events.timeline import UNKNOWN, Meaning

ROOT = "(root)"
"""The unit of parameters of no module that is known: the model itself, less its wrapped parts."""


@dataclass(frozen=True, slots=True)
class Label:
    """A phase that a trace announces by ``name``, and what that means; ``of_unit`` if it names a unit."""

    name: str
    meaning: Meaning
    of_unit: bool = True

    def text(self, unit: str) -> str:
        """As a trace spells it."""
        return f"{self.name}({unit})" if self.of_unit else self.name


NONE, FORWARD, BACKWARD, OPTIMIZER, GATHER, REDUCE, COPY_IN, COPY_OUT = range(8)
LABELS = (
    Label("", Meaning(0), of_unit=False),
    Label("refshard::forward", Meaning.FORWARD),
    Label("refshard::backward", Meaning.BACKWARD),
    Label("Optimizer.step#step", Meaning.OPTIMIZER, of_unit=False),
    Label("refshard::all_gather", Meaning.ALL_GATHER | Meaning.COPY_IN),
    Label("refshard::reduce_scatter", Meaning.REDUCE | Meaning.WAIT),
    Label("refshard::copy_in", Meaning.REDUCE | Meaning.COPY_IN),
    Label("refshard::copy_out", Meaning.COPY_OUT),
)
"""Labels by code, with the engine's names, which every reader of traces here knows."""
LEAVE = Label("refshard::leave", Meaning.LEAVE)
_BY_OPERATOR = {
    "all_gather_copy_in": GATHER, "chunk_cat": COPY_IN, "_chunk_cat": COPY_IN, "split_with_sizes_copy": COPY_OUT,
}  # fmt: skip
"""Kernels that FSDP2 moves parameters and gradients with, on whatever stream they run."""
_BY_PHASE = {
    Phase.OTHER: NONE, Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.RECOMPUTE: FORWARD,
    Phase.OPTIMIZER: OPTIMIZER,
}  # fmt: skip
_WRAPPERS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))
_GATHERS, _REDUCES = ("all_gather",), ("reduce_scatter", "all_reduce", "reduce")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Purposes:
    """Columns over all events: ``labels`` (int64) are codes of :data:`LABELS`; ``units`` (int32) index ``unit_names``
    or are :data:`~refshard.events.timeline.UNKNOWN`.
    """

    labels: npt.NDArray[np.int64]
    units: npt.NDArray[np.int32]
    unit_names: tuple[str, ...]


def purposes(recording: Recording, main: int) -> Purposes:
    """What all events are for; ``main`` is the stream that computes."""
    modules = [unit_of(module) for module in recording.module_table]
    unit_names = tuple(dict.fromkeys((*(unit for unit in modules if unit), ROOT)))
    code = {unit: number for number, unit in enumerate(unit_names)}
    units = np.array([code.get(unit, UNKNOWN) for unit in modules] or [UNKNOWN], np.int32)[recording.modules]
    labels = _labels(recording, main)
    # A forward or backward of no unit says nothing; what moves parameters of no known module moves the root's.
    labels = np.where(np.isin(labels, (FORWARD, BACKWARD)) & (units == UNKNOWN), NONE, labels)
    units = np.where((labels >= GATHER) & (units == UNKNOWN), code[ROOT], units)
    units = np.where(np.isin(labels, (NONE, OPTIMIZER)), UNKNOWN, units).astype(np.int32)
    return Purposes(labels=labels, units=units, unit_names=unit_names)


def unit_of(module: str) -> str:
    """The layer that a module belongs to, which is what strategies wrap; itself where it is in none.

    Names that wrappers add are left out.

    >>> unit_of("layers.0.attention.wq"), unit_of("_orig_mod.model.layers.11"), unit_of("tok_embeddings")
    ('layers.0', 'model.layers.11', 'tok_embeddings')
    """
    plain = ".".join(part for part in module.split(".") if part not in _WRAPPERS)
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", plain)
    return found[0] if found else plain


def _labels(recording: Recording, main: int) -> npt.NDArray[np.int64]:
    """The label of each event, before units are looked at."""
    by_phase = np.array([_BY_PHASE[phase] for phase in Phase])[recording.phases]
    by_name = np.array([_BY_OPERATOR.get(name.rpartition("::")[2], NONE) for name in recording.name_table] or [NONE])
    collective = recording.kinds == Kind.COLLECTIVE
    gathers, reduces = (_named(recording, names) & collective for names in (_GATHERS, _REDUCES))
    reduces &= (recording.phases == Phase.BACKWARD) | _named(recording, ("reduce_scatter",))
    launch = recording.kinds == Kind.LAUNCH
    aside = launch & (recording.streams != main) & ~_host_copies(recording)
    backward = np.isin(recording.phases, (Phase.BACKWARD, Phase.OTHER))
    for_gathers = aside & np.isin(recording.streams, _serving(recording, gathers, main))
    for_reduces = aside & np.isin(recording.streams, _serving(recording, reduces, main)) & (backward | ~for_gathers)
    conditions = (by_name[recording.names] * launch > 0, reduces | for_reduces, gathers | for_gathers)
    return np.select(conditions, (by_name[recording.names], REDUCE, GATHER), by_phase).astype(np.int64)


def _serving(recording: Recording, collectives: npt.NDArray[np.bool_], main: int) -> list[int]:
    """Streams of these collectives, and those that they wait for; never the main one."""
    carrying = set(recording.streams[collectives].tolist())
    recorded: dict[int, int] = {}
    feeding = set[int]()
    rows = np.flatnonzero(np.isin(recording.kinds, (Kind.RECORD, Kind.WAIT)))
    columns = (recording.kinds[rows].tolist(), recording.streams[rows].tolist(), recording.subjects[rows].tolist())
    for kind, stream, event in zip(*columns):
        if kind == Kind.RECORD:
            recorded[event] = stream
        elif stream in carrying and event in recorded:
            feeding.add(recorded[event])
    return sorted((carrying | feeding) - {main})


def _named(recording: Recording, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.array([name in names for name in recording.name_table] or [False])[
        recording.names
    ]
    return found


def _host_copies(recording: Recording) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = recording.flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST) != 0
    return found
