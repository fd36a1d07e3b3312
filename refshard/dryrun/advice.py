"""What would make a run fit, or use the memory that it leaves: remedies that were dry-run, and what others would free.

What needs no change of the script is tried: the allocator's other setting (from the recording), another number of GPUs,
and the numbers and fields of the command line that are known by their names. What only the script's author can change
is not tried; it is named with the bytes that it holds at the peak, and only where freeing them would be enough.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import categories, live_rows
from refshard.dryrun.recording import Category, Phase
from refshard.dryrun.sweep import largest
from refshard.dryrun.trials import Laboratory, Prediction, Trial, summary
from refshard.errors import SpecError
from refshard.outside_memory import EXPANDABLE_SEGMENTS

_CHECKPOINTING = "activation checkpointing of each layer"
_LAYER = re.compile(r"^(.*?\.\d+)(\.|$)")
_MANY = 64
"""Most times the run's own number of GPUs that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A ``change``, and what a dry run of it found."""

    change: str
    tried: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What holds ``held_bytes`` at the peak, and the ``change`` of the script that frees up to ``frees_bytes``."""

    what: str
    held_bytes: int
    change: str
    frees_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was tried, and changes of the script that are enough alone, the one that frees most first. ``together`` is
    set where no change is enough alone and all of ``savings`` together are.
    """

    remedies: tuple[Remedy, ...] = ()
    savings: tuple[Saving, ...] = ()
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What of a run can be varied without a change of its script. ``on_gpus`` is it on as many GPUs, which raises
    SpecError if the cluster or the job allows no such number. ``with_batch`` is it with another number in place of
    ``batch``, the value of the option ``batch_name``, where that is known. ``others`` are changes by what is written;
    ``checkpoints`` says that they include checkpointing.
    """

    on_gpus: Callable[[int], Trial]
    batch_name: str = ""
    batch: int = 0
    with_batch: Callable[[int], Trial] | None = None
    others: Mapping[str, Trial] = field(default_factory=dict)
    checkpoints: bool = False


def advise(found: Analysis, choices: Choices, laboratory: Laboratory) -> Advice:
    """For a run that does not fit, all that could make it fit; for one that fits, a larger batch."""
    batches = [*_batches(found, choices, laboratory)]
    if found.fits:
        return Advice(remedies=tuple(batches))
    others = zip(choices.others, laboratory.try_all(choices.others.values()))
    remedies = (
        *_segments(found), *(Remedy(change=change, tried=tried) for change, tried in others), *batches,
        *_more_gpus(found, choices, laboratory),
    )  # fmt: skip
    lacking = -found.headroom_bytes
    possible = [one for one in savings(found) if not (choices.checkpoints and one.change == _CHECKPOINTING)]
    if enough := tuple(one for one in possible if one.frees_bytes >= lacking):
        return Advice(remedies=remedies, savings=enough)
    most = {one.what: one for one in reversed(possible)}  # of two changes of the same, the one that frees more
    together = sum(one.frees_bytes for one in most.values()) >= lacking
    each = tuple(one for one in possible if most[one.what] is one)
    return Advice(remedies=remedies, savings=each if together else (), together=together)


def _segments(found: Analysis) -> Iterator[Remedy]:
    """Allocated again from the recording, when the script had ended."""
    other = found.run.answer.other_segments
    if other is not None and other.expandable and other.reserved < 0.99 * found.run.answer.peak.reserved:
        tried = msgspec.structs.replace(summary(found), fits=other.fits, reserved_bytes=other.reserved)
        yield Remedy(change=EXPANDABLE_SEGMENTS, tried=tried)


def _more_gpus(found: Analysis, choices: Choices, laboratory: Laboratory) -> Iterator[Remedy]:
    """The smallest number of GPUs that fits, of those that double the run's and that are allowed; else the largest."""
    own = found.run.request.world_size
    trials: list[Trial] = []
    for count in (own << n for n in range(1, _MANY.bit_length()) if own > 1):
        with suppress(SpecError):
            trials.append(choices.on_gpus(count))
    if not trials:
        return

    def tried(place: int) -> Prediction:
        return laboratory.try_all([trials[place]])[0]

    last = len(trials) - 1
    smallest = bisect_left(range(last), True, key=lambda place: bool(tried(place).fits)) if tried(last).fits else last
    yield Remedy(change=f"--gpus {trials[smallest].request.world_size}", tried=tried(smallest))


def _batches(found: Analysis, choices: Choices, laboratory: Laboratory) -> Iterator[Remedy]:
    """The largest batch that fits, if it is another; the smallest if none does."""
    own = summary(found)
    if choices.with_batch is None or (choices.batch <= 1 and not own.fits):
        return
    tried = largest(laboratory, choices.with_batch, 1, known={choices.batch: own})
    best = max((number for number, one in tried.items() if one.fits), default=1)
    if best != choices.batch:
        yield Remedy(change=f"{choices.batch_name} {best}", tried=tried[best])


def savings(found: Analysis) -> tuple[Saving, ...]:
    """What changes of the script would free at the peak, in the best case; most first."""
    recording, memory = found.run.recording, found.memory
    if not len(recording):
        return ()
    rows = live_rows(recording, memory.peak_at)
    kinds, sizes = categories(recording, rows), recording.sizes[rows]
    held = {Category(kind): int(sizes[kinds == kind].sum()) for kind in set(kinds.tolist())}
    modules = [recording.module_table[code] for code in recording.modules[rows].tolist()]
    layers: Counter[str] = Counter()
    outside = 0
    for module, size, kind, phase in zip(modules, sizes.tolist(), kinds.tolist(), recording.phases[rows].tolist()):
        if kind != Category.ACTIVATIONS:
            continue
        if layer := _LAYER.match(module):
            layers[layer[1]] += size if phase == Phase.FORWARD else 0
        else:
            outside += size
    inside, one_layer = layers.total(), max(layers.values(), default=0)
    optimizer = held.get(Category.OPTIMIZER, 0)
    unsharded = held.get(Category.UNSHARDED, 0)
    possible = [
        Saving(what=what, held_bytes=held_bytes, change=change, frees_bytes=int(share * held_bytes))
        for what, held_bytes, change, share in (
            ("what lies outside of layers (logits and loss)", outside, "a chunked or fused loss", 1),
            ("optimizer state", optimizer, "an 8-bit optimizer", 0.75),
            ("optimizer state", optimizer, "offloading it to the CPU", 1),
            ("unsharded parameters", unsharded, "resharding after forward", 1),
        )
    ]
    if len(layers) > 1 and not (recording.phases == Phase.RECOMPUTE).any():
        possible.append(
            Saving(
                what=f"activations of {len(layers)} layers",
                held_bytes=inside,
                change=_CHECKPOINTING,
                frees_bytes=inside - one_layer,
            )
        )
    worth = [one for one in possible if one.frees_bytes > 0.02 * memory.peak_bytes]
    return tuple(sorted(worth, key=lambda one: -one.frees_bytes))
