"""The answer of a script that held memory back by ``record_stream()``, as on a GPU."""

from types import ModuleType

import msgspec

from refshard.dryrun.held_back import (
    UNLIMITED,
    NotReproducedError,
    Reallocation,
    Refusal,
    Settled,
    holds_back,
    settle,
    with_segments_of,
)
from refshard.dryrun.recording import Kind, Phase, Recording
from refshard.dryrun.request import UNLIMITED_BYTES, Answer, OtherSegments, Request
from refshard.dryrun.steps import steps_of
from refshard.errors import SpecError
from refshard.specs.cluster import load_cluster


def settle_answer(
    answer: Answer, recording: Recording, request: Request, ext: ModuleType, device: int
) -> tuple[Answer, Recording]:
    """The answer and the recording with memory of the GPU ``device`` held until that is done with it; unchanged if none
    is held back.

    With or without a limit on the run, the result also has the answer within the GPU's memory.
    """
    if not holds_back(recording):
        return answer, recording
    if answer.outcome not in ("stepped", "ended"):
        doubt = "the script did not take all its steps, so it is not replayed"
        return msgspec.structs.replace(answer, held_until="host", doubt=doubt), recording
    memory_bytes = load_cluster(request.cluster).accelerator.memory_bytes
    try:
        found = _settle(recording, request, ext, device, memory_bytes)
        within = settled(answer, found, device)
        if found.allocator.refused is not None:
            found = _settle(recording, request, ext, device, UNLIMITED)
    except (NotReproducedError, SpecError) as error:
        return msgspec.structs.replace(answer, held_until="host", doubt=str(error)), recording
    return msgspec.structs.replace(settled(answer, found, device), limited=within), found.recording


def other_segments(
    answer: Answer, recording: Recording, request: Request, ext: ModuleType, device: int
) -> OtherSegments | None:
    """What ``recording``, of the script's own run, reserves with the other setting of ``expandable_segments``.

    None if the script did not take all its steps, or the run cannot be allocated again.
    """
    if answer.outcome not in ("stepped", "ended") or not len(recording):
        return None
    expandable = not ext.expandable_segments(device)

    def allocated(total_bytes: int) -> Reallocation:
        if holds_back(recording):
            return _settle(recording, request, ext, device, total_bytes, expandable=expandable).allocator
        return with_segments_of(
            recording, ext, device, as_run_bytes=_as_run_bytes(request),
            total_bytes=total_bytes, expandable=expandable,
        )  # fmt: skip

    try:
        found = allocated(load_cluster(request.cluster).accelerator.memory_bytes)
        fits = found.refused is None
        peak = found.peak if fits else allocated(UNLIMITED).peak
    except (NotReproducedError, SpecError):
        return None
    return OtherSegments(expandable=expandable, reserved=peak.reserved, fits=fits)


def _settle(
    recording: Recording,
    request: Request,
    ext: ModuleType,
    device: int,
    memory_bytes: int,
    *,
    expandable: bool | None = None,
) -> Settled:
    cluster = load_cluster(request.cluster)
    (found,) = settle(
        (recording,), cluster.of_world_size(request.world_size), ext, device,
        as_run_bytes=_as_run_bytes(request), total_bytes=memory_bytes, expandable=expandable,
    )  # fmt: skip
    return found


def _as_run_bytes(request: Request) -> int:
    """The memory of the GPU that the script's process saw."""
    return load_cluster(request.cluster).accelerator.memory_bytes if request.limited else UNLIMITED_BYTES


def settled(answer: Answer, found: Settled, device: int) -> Answer:
    """The answer with what the allocator tells; out of memory where it refused an allocation."""
    allocator = found.allocator
    figures = {
        "held_until": "gpu", "peak_as_run": answer.peak, "peak": allocator.peak, "now": allocator.now,
        "retries": allocator.retries,
    }  # fmt: skip
    if (refused := allocator.refused) is not None:
        figures |= _refusal(refused, found.recording, device)
    return msgspec.structs.replace(answer, **figures)


def _refusal(refused: Refusal, recording: Recording, device: int) -> dict[str, object]:
    before = recording.kinds[: refused.row]
    steps = sum(step.end <= refused.row for step in steps_of(recording, "step"))
    return {
        "outcome": "oom", "error": refused.message.replace(" GPU 0 ", f" GPU {device} "),
        "where": _place(recording, refused.row), "steps_taken": steps,
        "allocations": int((before == Kind.ALLOCATE).sum()),
    }  # fmt: skip


def _place(recording: Recording, row: int) -> str:
    """The script's lines are not recorded for allocations."""
    operator = recording.name_table[recording.names[row]] or "an allocation"
    module = recording.module_table[recording.modules[row]]
    return f"{operator}, {Phase(int(recording.phases[row])).name.lower()}" + (f" of {module}" if module else "")
