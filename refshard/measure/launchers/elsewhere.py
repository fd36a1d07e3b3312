"""What the machines are that a launcher's ranks run on, asked of ranks there."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from refshard.errors import LaunchError
from refshard.measure.describe import ASKED, Asked, described_file
from refshard.measure.environment import differences
from refshard.measure.launchers.base import Job, Launcher
from refshard.records import Environment

_LIMIT_S = 600.0


def environment_elsewhere(
    launcher: Launcher,
    processes: int,
    threads: int,
    network: str,
    beside: Path,
    on_progress: Callable[[str], None],
) -> Environment:
    """Launch ``processes`` ranks that describe their machines, in a folder beside the run's, and return rank 0's; in
    ``network`` what joins them, which a run must have throughout.

    Raises:
        LaunchError: a rank could not, or its machine is of another kind than rank 0's.
    """
    try:
        found = _found(launcher, processes, Asked(threads=threads, network=network), beside, on_progress)
    except OSError as error:  # of this process
        raise LaunchError(f"ranks cannot write machine data next to {beside} ({error}); fix the cause") from None
    for rank, other in found.items():
        if differing := differences(found[0], other):
            raise LaunchError(
                f"all hosts of a run must be alike: from {found[0].hostname} (rank 0) to {other.hostname} "
                f"(rank {rank}), {'; '.join(differing)}; choose hosts that are alike"
            )
    return msgspec.structs.replace(found[0], argv=("refshard", *sys.argv[1:]))


def _found(
    launcher: Launcher, processes: int, asked: Asked, beside: Path, on_progress: Callable[[str], None]
) -> dict[int, Environment]:
    """What ranks tell of their machines, by rank; rank 0 is there, others as far as this host sees their files."""
    beside.parent.mkdir(parents=True, exist_ok=True)
    parent, prefix = beside.absolute().parent, f".{beside.name}-environment-"
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / ASKED).write_bytes(msgspec.json.encode(asked))
        job = Job(program="environment", processes=processes, time_limit_s=_LIMIT_S)
        launch = launcher.launch(job, folder, on_progress)
        if launch.timed_out or launch.error or not described_file(folder, 0).exists():
            cause = f"no answer within {_LIMIT_S:g} s" if launch.timed_out else launch.error or "no answer"
            last = next((line.strip() for line in reversed(launch.log_tail) if line.strip()), "it wrote nothing")
            raise LaunchError(f"the ranks could not describe their machines: {cause} ({last}); correct that")
        return {
            rank: msgspec.json.decode(path.read_bytes(), type=Environment)
            for rank in range(processes)
            if (path := described_file(folder, rank)).exists()
        }
