"""GPU memory outside torch's allocator in a run that was recorded.

The fake device takes a communicator's memory when a group first communicates, so that the allocator has what is left.
"""

from refshard.dryrun.recording import GROUP, Kind, Recording
from refshard.outside_memory import COMMUNICATOR_BYTES, Overhead, context
from refshard.quantities import MIB
from refshard.specs.hardware import HardwareSpec


def overheads(hardware: HardwareSpec, recording: Recording) -> tuple[Overhead, ...]:
    """What a rank needs outside the allocator in the run that was recorded."""
    rows = recording.kinds == Kind.COMMUNICATOR
    count = int(rows.sum())
    if not count:
        return (context(hardware),)
    first, further = (size // MIB for size in COMMUNICATOR_BYTES)
    groups = len({subject & GROUP for subject in recording.subjects[rows].tolist()})
    nccl = Overhead(
        name="1 NCCL communicator" if count == 1 else f"{count} NCCL communicators",
        bytes=int(recording.sizes[rows].sum()),
        source=f"of {'1 process group' if groups == 1 else f'{groups} process groups'}; measured on an H200: {first} "
        f"MiB for the first, {further} for each further one (profiles/recorded/h200/outside.json)",
    )
    return context(hardware), nccl
