"""What the processes of a dry run are asked for, and what they leave."""

from pathlib import Path

import msgspec

from refshard.dryrun.request import Pool
from refshard.records import Census, CollectiveCount, State, StepTrace
from refshard.specs.case import CaseSpec

ASKED_FILE = "dryrun.json"
RECORDING_FILE = "recording.npz"
NOTHING = Pool(allocated=0, active=0, reserved=0, requested=0)


class DryCase(msgspec.Struct, frozen=True, kw_only=True):
    """The rank ``rank`` of a case; the last of :func:`ranks_of` replays them together.

    ``limited`` by what the GPU's memory holds, or by nothing, to learn what the case would take. ``traced`` ones leave
    a trace of each rank.
    """

    case: CaseSpec
    rank: int = 0
    limited: bool = True
    traced: bool = True


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of a rank, replayed: where its time goes, the collectives that its host issued, what it asked for.

    ``step_s`` is from the end of the step before to its own end. ``host_waits`` counts by reason how often the host
    waited for the device. ``peak`` is the rank's, of all steps, if a rank held memory back by ``record_stream()``.
    """

    step_s: float
    trace: StepTrace
    issued: tuple[CollectiveCount, ...]
    census: Census
    memory_course_bytes: tuple[int, ...]
    host_waits: dict[str, int]
    peak: Pool | None = None


class DryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports. ``peak`` is that of the caching allocator over all steps, ``usable_bytes`` what it may
    reserve. ``refused`` is how much was asked for when there was no more, in torch's words. The optimizer of this rank
    steps ``stepped`` elements of those ``trained`` by all, of which it holds ``held``. The last rank has the ``steps``
    of all.

    If a rank held memory back by ``record_stream()``, the replay decides, and the last rank tells of all: whether the
    case ``fits`` into the GPU's memory; if not, ``limited`` is the result within it.
    """

    state: State
    error: str | None = None
    usable_bytes: int = 0
    peak: Pool = NOTHING
    refused: str = ""
    blocks: tuple[str, ...] = ()
    flops_per_token: float | None = None
    wrapped_units: tuple[str, ...] = ()
    announced: tuple[CollectiveCount, ...] = ()
    stepped: int = 0
    trained: int = 0
    held: int = 0
    steps: tuple[StepResult, ...] = ()
    warnings: tuple[str, ...] = ()
    fits: bool = False
    limited: "DryResult | None" = None


def ranks_of(case: CaseSpec) -> tuple[int, ...]:
    """The ranks that a dry run follows: one of each pipeline rank's, since the others compute alike."""
    return case.stage_ranks


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the process of a rank works, within the folder of its case."""
    return folder / f"rank{rank}"


def result_file(folder: Path) -> Path:
    """Where a process leaves its :class:`DryResult`, in the folder where it works."""
    return folder / "result.json"
