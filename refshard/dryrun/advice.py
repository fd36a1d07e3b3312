"""What would make a run fit, or use the memory that it leaves: remedies that were dry-run, and what others would free.

What needs no change of the script is tried: the allocator's other setting (from the recording), another number of GPUs,
and the numbers and fields of the command line that are known by their names. What only the script's author can change
is not tried; it is named with the bytes that it holds at the peak, and only where freeing them would be enough.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import categories, live_rows
from refshard.dryrun.overheads import overheads
from refshard.dryrun.recording import Category, Phase
from refshard.dryrun.request import Request
from refshard.dryrun.sweep import largest
from refshard.dryrun.trials import Laboratory, Prediction, Trial, summary
from refshard.errors import SpecError
from refshard.specs.cluster import load_cluster

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_BATCH = re.compile(r"^-{0,2}(?P<name>[\w.-]*batch(?:[_-]?size)?[\w.-]*?)(?:=(?P<value>\d+))?$", re.IGNORECASE)
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


def advise(found: Analysis, laboratory: Laboratory) -> Advice:
    """For a run that does not fit, all that could make it fit; for one that fits, a larger batch."""
    remedies = [*_batches(found, laboratory)]
    if found.fits is not False:
        return Advice(remedies=tuple(remedies))
    remedies = [*_segments(found), *_checkpointing(found, laboratory), *remedies, *_more_gpus(found, laboratory)]
    lacking, possible = -found.headroom_bytes, savings(found)
    if enough := tuple(one for one in possible if one.frees_bytes >= lacking):
        return Advice(remedies=tuple(remedies), savings=enough)
    most = {one.what: one for one in reversed(possible)}  # of two changes of the same, the one that frees more
    together = sum(one.frees_bytes for one in most.values()) >= lacking
    each = tuple(one for one in possible if most[one.what] is one)
    return Advice(remedies=tuple(remedies), savings=each if together else (), together=together)


def _segments(found: Analysis) -> Iterator[Remedy]:
    """Allocated again from the recording, when the script had ended."""
    other = found.run.answer.other_segments
    if other is not None and other.expandable and other.reserved < 0.99 * found.run.answer.peak.reserved:
        tried = msgspec.structs.replace(summary(found), fits=other.fits, reserved_bytes=other.reserved)
        yield Remedy(change=EXPANDABLE, tried=tried)


def _more_gpus(found: Analysis, laboratory: Laboratory) -> Iterator[Remedy]:
    """The smallest number of GPUs that fits, of those that double the run's and that the cluster allows."""
    request = found.run.request
    if request.world_size == 1:
        return
    counts = [request.world_size << n for n in range(1, _MANY.bit_length())]
    trials = [one for count in counts if (one := _on_gpus(request, count)) is not None]
    low, high, tried = 0, len(trials), dict[int, Prediction]()
    if trials:
        last = len(trials) - 1
        tried[last] = laboratory.try_all([trials[last]])[0]
        if not tried[last].fits:
            yield Remedy(change=_gpus(trials[last]), tried=tried[last])
            return
    while low < high:
        middle = (low + high) // 2
        if middle not in tried:
            tried[middle] = laboratory.try_all([trials[middle]])[0]
        low, high = (low, middle) if tried[middle].fits else (middle + 1, high)
    if trials:
        yield Remedy(change=_gpus(trials[low]), tried=tried[low])


def _gpus(trial: Trial) -> str:
    return f"--gpus {trial.request.world_size}"


def _on_gpus(request: Request, count: int) -> Trial | None:
    try:
        cluster = load_cluster(request.cluster).of_world_size(count)
    except SpecError:
        return None
    changed = msgspec.structs.replace(
        request, world_size=count, local_ranks=cluster.ranks_per_node,
        unusable_bytes=sum(one.bytes for one in overheads(count)),
    )  # fmt: skip
    return Trial(request=changed)


def _batches(found: Analysis, laboratory: Laboratory) -> Iterator[Remedy]:
    """The largest value of the command's only option for the batch, if that is a number."""
    request = found.run.request
    place = _batch_option(request.command)
    if place is None:
        return
    at, prefix, value = place

    def trial_of(number: int) -> Trial:
        words = (*request.command[:at], f"{prefix}{number}", *request.command[at + 1 :])
        return Trial(request=msgspec.structs.replace(request, command=words))

    own = summary(found)
    if own.fits is False and value == 1:
        return
    tried = largest(laboratory, trial_of, 1, known={value: own})
    best = max((number for number, one in tried.items() if one.fits), default=0)
    name = prefix.rstrip("=") or request.command[at - 1]
    if best and best != value:
        yield Remedy(change=f"{name} {best}", tried=tried[best])
    elif not best:
        yield Remedy(change=f"{name} 1", tried=tried[1])


def _batch_option(command: Sequence[str]) -> tuple[int, str, int] | None:
    """Where the batch's number is: the place of its word, what comes before it in the word, and the number."""
    places: list[tuple[int, str, int]] = []
    for at, word in enumerate(command):
        if (match := _BATCH.match(word)) is None:
            continue
        following = command[at + 1] if at + 1 < len(command) else ""
        if match["value"]:
            places.append((at, word[: match.start("value")], int(match["value"])))
        elif word.startswith("-") and following.isdigit():
            places.append((at + 1, "", int(following)))
    return places[0] if len(places) == 1 and places[0][2] >= 1 else None


def _checkpointing(found: Analysis, laboratory: Laboratory) -> Iterator[Remedy]:
    """With --model, checkpointing is a field of the command."""
    request = found.run.request
    words = tuple("checkpointing=full" if word.startswith("checkpointing=") else word for word in request.command)
    if words != request.command:
        (tried,) = laboratory.try_all([Trial(request=msgspec.structs.replace(request, command=words))])
        yield Remedy(change="--checkpointing full", tried=tried)


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
                change="activation checkpointing of each layer",
                frees_bytes=inside - one_layer,
            )
        )
    worth = [one for one in possible if one.frees_bytes > 0.02 * memory.peak_bytes]
    return tuple(sorted(worth, key=lambda one: -one.frees_bytes))
