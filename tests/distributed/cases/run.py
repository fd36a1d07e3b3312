"""Runs cases on ranks, many in one launch, and tells how each ended.

A crash or a hang costs no other case its result.
"""

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from refshard.errors import RefshardError
from refshard.measure.worker import ASK
from tests.distributed.cases import corpus, deliberate
from tests.distributed.cases.case import Case, Kind
from tests.distributed.cases.sides import Bare, Engine, Fsdp2, Side, Variant
from tests.distributed.ranks import rank_processes
from tests.fakecuda.processes import on_fake_device
from tests.fakecuda.recorded import racing

FSDP2 = "fsdp2"
CPU = torch.device("cpu")
_HOST = "127.0.0.1"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


Device = Literal["cpu", "fake-cuda"]
"""``fake-cuda``: each rank computes on a fake GPU of its own, where streams are watched for races."""


class Run(NamedTuple):
    """One case in one way: a mode, or ``fsdp2``."""

    case: str
    way: str
    variant: Variant


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, in a sentence unless it is right, and what refshard warned of."""

    kind: Kind
    message: str = ""
    warned: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What one rank tells of a run; ``at`` is when it ended there, so that the first of several errors is known."""

    kind: Kind
    message: str
    warned: tuple[str, ...]
    at: float
    seconds: float

    @property
    def lost(self) -> bool:
        """Whether the connection to another rank broke."""
        return any(words in self.message for words in _LOST)


class _Launch(NamedTuple):
    """What all ranks of a launch are told.

    ``collective_s`` is how long a rank waits in a collective for one that does not come, ``run_s`` how long a launch
    waits for any news, in seconds: on two cores that others use too, a case that compiles takes over a minute.
    """

    world_size: int
    runs: list[Run]
    device: Device
    collective_s: float
    run_s: float


def run_all(
    world_size: int,
    runs: Sequence[Run],
    *,
    device: Device = "cpu",
    collective_s: float = 60,
    run_s: float = 180,
    report: Callable[[Run, Outcome], object] = lambda *_: None,
) -> dict[Run, Outcome]:
    """Run each on that many ranks. ``report`` hears of what a launch brought."""
    outcomes: dict[Run, Outcome] = {}
    rest = list(runs)
    while rest:
        told, fate = _launch(_Launch(world_size, rest, device, collective_s, run_s))
        outcomes.update(zip(rest, map(_joined, told)))
        if fate is not None:
            outcomes[rest[len(told)]] = fate
        for run in rest[: len(told) + (fate is not None)]:
            report(run, outcomes[run])
        rest = rest[len(told) + (fate is not None) :]
    return outcomes


def _joined(told: tuple[_Told, ...]) -> Outcome:
    """What counts of the ranks' tales: the first error, since the others follow from it; else a wrong value.

    A lost connection always follows from another rank's error, even where the clocks say otherwise: a rank that times
    out closes its sockets before it has raised.
    """
    ends = sorted((t for t in told if t.kind not in ("right", "wrong", "race")), key=lambda t: (t.lost, t.at))
    amiss = [t for kind in ("race", "wrong") for t in told if t.kind == kind]
    chosen = (ends or amiss or [told[0]])[0]
    warned = dict.fromkeys(warning for t in told for warning in t.warned)
    return Outcome(kind=chosen.kind, message=chosen.message, warned=tuple(warned), seconds=max(t.seconds for t in told))


def _launch(launch: _Launch) -> tuple[list[tuple[_Told, ...]], Outcome | None]:
    """Run as many as possible in one launch; what the ranks tell of these, and how the next one killed the launch."""
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=launch.run_s))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = on_fake_device if launch.device == "fake-cuda" else rank_processes().Process
        ranks = [
            start(target=_rank, args=(rank, store.port, folder, launch), daemon=True)
            for rank in range(launch.world_size)
        ]
        for process in ranks:
            process.start()
        try:
            fate = _watch(ranks, folder, launch.run_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return list(zip(*(_read(folder / str(rank)) for rank in range(launch.world_size)))), fate


def _watch(ranks: Sequence[Any], folder: Path, run_s: float) -> Outcome | None:
    """Wait until all ranks have ended, one has died, or none has news for too long."""
    size, since = 0, time.monotonic()
    while any(process.is_alive() for process in ranks):
        ranks[0].join(0.05)
        dead = [process.exitcode for process in ranks if process.exitcode]
        if dead:
            time.sleep(0.2)
            name = signal.Signals(-dead[0]).name if dead[0] < 0 else f"exit status {dead[0]}"
            return Outcome(kind="crash", message=f"{name}: {_ends(folder)}")
        news = sum(path.stat().st_size for path in folder.glob("[0-9]"))
        if news != size:
            size, since = news, time.monotonic()
        elif time.monotonic() - since > run_s:
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid, ASK)
            time.sleep(2)
            return Outcome(kind="hang", message=f"no news for {run_s:g} s; the ranks are here: {_ends(folder)}")
    return None


def _ends(folder: Path) -> str:
    """The end of each rank's stderr. A rank that crashed, or was asked, has written its stacks there."""
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("*.stderr")))


def _read(path: Path) -> Iterator[_Told]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


class _Place(NamedTuple):
    """Where a run is: one rank of several, that meet at a store; they share a folder."""

    rank: int
    world_size: int
    store: Store
    folder: Path
    device: torch.device
    collective_s: float


def _rank(rank: int, port: int, folder: Path, launch: _Launch) -> None:
    """In each rank: run one after another, and write down at once how each ended."""
    torch.set_num_threads(1)
    stderr = (folder / f"{rank}.stderr").open("w")
    os.dup2(stderr.fileno(), 2)
    faulthandler.enable(stderr)
    faulthandler.register(ASK, stderr)  # never by a timer: its thread reads frames that change, and may crash the rank
    device = CPU if launch.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # A rank that another one keeps waiting is not the one to tell of it.
    store = TCPStore(_HOST, port, timeout=timedelta(seconds=10 * launch.run_s))
    reference: tuple[tuple[str, Variant], Any] | None = None
    known = {**corpus.CASES, **deliberate.CASES}
    gc.freeze()
    with (folder / str(rank)).open("wb") as file:
        for index, run in enumerate(launch.runs):
            shared = folder / f"run {index}"
            shared.mkdir(exist_ok=True)
            case = known[run.case]
            if reference is None or reference[0] != (run.case, run.variant):
                reference = (run.case, run.variant), _reference(case, run.variant, shared / f"bare {rank}", device)
            place = _Place(rank, launch.world_size, PrefixStore(str(index), store), shared, device, launch.collective_s)
            pickle.dump(_tell(case, run, reference[1], place), file)
            file.flush()


def run_bare(case: Case, variant: Variant, folder: Path, device: torch.device = CPU) -> list[tuple[str, torch.Tensor]]:
    """What a case logs in one process."""
    folder.mkdir(exist_ok=True)
    with _settings():
        side = Bare(variant, folder, device)
        case.run(side)
        return side.finish()


def _reference(
    case: Case, variant: Variant, folder: Path, device: torch.device
) -> list[tuple[str, torch.Tensor]] | str:
    try:
        with warnings.catch_warnings(action="ignore"):
            return run_bare(case, variant, folder, device)
    except Exception as error:
        return f"unsharded: {_sentence(error)}"


def _tell(case: Case, run: Run, reference: Any, place: _Place) -> _Told:
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind, message, at = _attempt(case, run, reference, place)
    warned = tuple(str(w.message) for w in caught if str(w.message).startswith("refshard"))
    gc.collect()
    return _Told(kind=kind, message=message, warned=warned, at=at, seconds=time.monotonic() - began)


def _attempt(case: Case, run: Run, reference: Any, place: _Place) -> tuple[Kind, str, float]:
    """Train, and compare. The group ends with an error, so that ranks that wait for this one fail at once."""
    if isinstance(reference, str):
        return "obscure", reference, time.monotonic()
    dist.init_process_group(
        "gloo" if place.device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=place.store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.collective_s),
    )
    kind, message = _train(case, run, reference, place)
    at = time.monotonic()
    if kind not in ("right", "wrong"):
        _end_groups()
    # Through the store: a rank that leaves a barrier of sockets closes them on those that are still within.
    place.store.set(f"done {place.rank}", "")
    place.store.wait([f"done {other}" for other in range(place.world_size)])
    if dist.is_initialized():
        dist.destroy_process_group()
    return kind, message, at


def _train(case: Case, run: Run, reference: list[tuple[str, torch.Tensor]], place: _Place) -> tuple[Kind, str]:
    races: list[str] = []
    try:
        with _settings(), nullcontext(races) if place.device.type == "cpu" else racing() as races:
            side = _side(run, place)
            case.run(side)
            logged = side.finish()
        message = difference(logged, reference, case.rtol)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return _kind_of(error), _sentence(error)
    if races:
        return "race", f"{len(races)} races: {races[0]}"
    return ("wrong" if message else "right"), message


def _side(run: Run, place: _Place) -> Side:
    if run.way == FSDP2:
        return Fsdp2(run.variant, place.folder, place.device)
    return Engine(run.variant, place.folder, place.device, run.way)


def _end_groups() -> None:
    """Close all sockets, so that a rank that waits for this one fails at once; also those of groups that a model has
    made, whose time limit is torch's half an hour: they last until the model is gone.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):
            group._get_backend(CPU).abort()
    dist.destroy_process_group()
    gc.collect()


@contextmanager
def _settings() -> Iterator[None]:
    """fp64 by default, seeded; and whatever a case changed of torch's settings, undone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def _kind_of(error: BaseException) -> Kind:
    if isinstance(error, RefshardError):
        return "refused"
    return "hang" if "timed out" in str(error).lower() or "timeout" in str(error).lower() else "obscure"


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def difference(mine: list[tuple[str, torch.Tensor]], theirs: list[tuple[str, torch.Tensor]], rtol: float) -> str:
    """Name the first logged value that is not as it should be; nothing if all are.

    A value is measured against the largest of its tensor: single elements may be the rest of a cancellation.
    """
    names = [name for name, _ in theirs]
    if [name for name, _ in mine] != names:
        pairs = zip_longest((name for name, _ in mine), names, fillvalue="nothing")
        return "logged {!r} where {!r} was due".format(*next(pair for pair in pairs if pair[0] != pair[1]))
    for (name, value), (_, expected) in zip(mine, theirs):
        if value.shape != expected.shape:
            return f"{name}: shape {tuple(value.shape)}, not {tuple(expected.shape)}"
        if not expected.numel():
            continue
        wide = torch.complex128 if expected.is_complex() else torch.float64
        scale = expected.to(wide).abs().max().clamp(min=1e-12)
        distance = (value.to(wide) - expected.to(wide)).abs().max() / scale
        if not distance <= rtol:
            return f"{name}: off by {distance:.1e} of its largest value"
    return ""
