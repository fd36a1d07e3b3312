"""Several dry runs in parallel on the machine's cores; only their figures are kept.

Results are stored under a key of all inputs, so that an interrupted search resumes.
Trials that differ only in the links between the same GPUs share one run of the script.
"""

import hashlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from refshard.dryrun.analyse import Analysis, analyse
from refshard.dryrun.measured_prices import MeasuredTrace, check_device, read_measured
from refshard.dryrun.request import Request
from refshard.dryrun.run import DryRun, dry_run
from refshard.errors import RefshardError
from refshard.quantities import format_bytes
from refshard.specs.cluster import ClusterSpec, load_cluster


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A request, the tokens of a step over all ranks where they are given, and a trace that prices kernels, if any."""

    request: Request
    global_tokens: int | None = None
    prices: Path | None = None

    @property
    def cluster(self) -> ClusterSpec:
        """The part of the request's cluster that its ranks fill."""
        return load_cluster(self.request.cluster).of_world_size(self.request.world_size)

    @property
    def measured(self) -> MeasuredTrace | None:
        """The trace that prices kernels.

        Raises:
            TraceError: the file is damaged, no trace, or shows no kernels of a GPU.
            SpecError: it is of another GPU.
        """
        if self.prices is None:
            return None
        found = read_measured(self.prices)
        check_device(found, self.cluster.accelerator)
        return found

    def check_prices(self) -> None:
        """Find out what is wrong with the trace before anything runs; raises what ``measured`` raises."""
        _ = self.measured

    def analyse(self, run: DryRun, *, races: bool = False) -> Analysis:
        """Price and replay what ran."""
        return analyse(run, self.cluster, global_tokens=self.global_tokens, races=races, measured=self.measured)

    @property
    def key(self) -> str:
        """Of all that the result depends on, as far as it is known: the request, its cluster, and the script's file."""
        changed = "" if self.prices is None else str(self.prices.stat().st_mtime_ns)
        known = (str(self.prices), self.request, self.global_tokens, changed)
        return _digest(msgspec.json.encode((known, load_cluster(self.request.cluster))), self._script())

    @property
    def recording_key(self) -> str:
        """Equal for trials that share a recording: the links between GPUs, and the cluster's name, play no part."""
        request, cluster = msgspec.structs.replace(self.request, cluster=""), load_cluster(self.request.cluster)
        return _digest(msgspec.json.encode((request, cluster.accelerator)), self._script())

    def _script(self) -> bytes:
        path = Path(self.request.command[0])
        return path.read_bytes() if not self.request.module and path.is_file() else b""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a dry run. ``fits`` is None without a verdict; ``why`` says why it does not fit, or failed.

    Bytes are the allocator's at its peak; if it does not fit, those without a memory limit. ``step_s``, ``exposed_s``
    and ``wall_s`` (on this machine) are seconds, ``tokens_per_s`` is per GPU, ``mfu`` a fraction. ``retries`` counts
    how often the allocator emptied its cache. ``measured`` is the part of compute time that a trace priced.
    """

    fits: bool | None
    why: str = ""
    reserved_bytes: int
    allocated_bytes: int
    usable_bytes: int
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    retries: int = 0
    exposed_s: float | None = None
    wall_s: float = 0.0
    measured: float | None = None


def summary(found: Analysis) -> Prediction:
    """The figures of an analysis."""
    answer = found.run.answer
    why = answer.error if answer.outcome == "failed" else ", ".join(f"no phase '{name}'" for name in found.unreached)
    if found.fits is False:
        usable = format_bytes(found.usable_bytes)
        known = found.run.refused is not None  # else it did not come to its end without a limit either
        why = f"needs {format_bytes(answer.peak.reserved)} of {usable}" if known else f"needs more than {usable}"
    if found.fits is None:
        why = why or "no optimizer step had work on the GPU"
    return Prediction(
        fits=found.fits, why=why, reserved_bytes=answer.peak.reserved, allocated_bytes=answer.peak.allocated,
        usable_bytes=found.usable_bytes, step_s=found.step_s, tokens_per_s=found.tokens_per_s, mfu=found.mfu,
        retries=answer.retries, exposed_s=found.exposed_s, wall_s=answer.wall_s,
        measured=None if found.coverage is None else found.coverage.share,
    )  # fmt: skip


class Laboratory:
    """Runs trials, ``jobs`` at a time, and keeps what they found; in ``file`` too, if one is given.

    Use it as a context: it ends the processes that it started. ``on_tried`` is called with each trial that was run.
    """

    def __init__(
        self, jobs: int, file: Path | None = None, on_tried: Callable[[Trial, Prediction], None] = lambda *_: None
    ) -> None:
        self._known: dict[str, Prediction] = {} if file is None else read_trials(file)
        self._file, self._on_tried = file, on_tried
        if file is not None and file.exists() and not file.read_bytes().endswith(b"\n"):
            with file.open("ab") as cut_off:
                cut_off.write(b"\n")
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_script_first)

    def __enter__(self) -> "Laboratory":
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        for process in multiprocessing.active_children() if raised else ():
            process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def knows(self, trial: Trial) -> bool:
        """Whether it need not be run."""
        return trial.key in self._known

    def try_all(self, trials: Iterable[Trial]) -> list[Prediction]:
        """What each of them finds, in their order; those that were tried before are not run again."""
        wanted = list(trials)
        groups: dict[str, list[Trial]] = {}
        for trial in {trial.key: trial for trial in wanted}.values():
            if not self.knows(trial):
                groups.setdefault(trial.recording_key, []).append(trial)
        futures = {self._pool.submit(_try_alike, tuple(group)): group for group in groups.values()}
        for future in as_completed(futures):
            for trial, tried in zip(futures[future], future.result()):
                self._keep(trial, tried)
        return [self._known[trial.key] for trial in wanted]

    def _keep(self, trial: Trial, tried: Prediction) -> None:
        self._known[trial.key] = tried
        if self._file is not None:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode({"key": trial.key, "command": trial.request.command, "tried": tried}))
                file.write(b"\n")
        self._on_tried(trial, tried)


class _Line(msgspec.Struct):
    key: str
    tried: Prediction


def read_trials(file: Path) -> dict[str, Prediction]:
    """What :class:`Laboratory` wrote, by key; nothing if there is no file. A line that was cut off is left out."""
    found: dict[str, Prediction] = {}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError:
            continue
        found[read.key] = read.tried
    return found


def _end_script_first() -> None:
    """A process of the pool that is ended ends the script's process too; Ctrl-C is for whoever started the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def _try_alike(trials: Sequence[Trial]) -> list[Prediction]:
    """Trials that share a recording, in a process of the pool."""
    try:
        run = dry_run(trials[0].request, quiet=True)
    except RefshardError as error:
        failed = Prediction(fits=None, why=str(error), reserved_bytes=0, allocated_bytes=0, usable_bytes=0)
        return [failed for _ in trials]
    return [summary(trial.analyse(run)) for trial in trials]


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
