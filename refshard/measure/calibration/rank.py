"""One rank of a calibration.

It reads ``FOLDER/calibration.json``, measures piece by piece together with all others, and writes what it has so far to
``FOLDER/samples-rank<r>.json`` after each. Like a rank of a case it imports torch, numpy and msgspec and nothing
heavier.
"""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from refshard.errors import LaunchError
from refshard.folders import replace_file
from refshard.measure.calibration import kernels
from refshard.measure.calibration.collectives import (
    Agreement,
    FailedOnSomeRankError,
    make_groups,
    measure_beside,
    time_collective,
)
from refshard.measure.calibration.kernels import CpuStopwatch, CudaStopwatch
from refshard.measure.calibration.samples import (
    BESIDE,
    DTYPES,
    ELEMENTWISE,
    IN_BURSTS,
    NEW_MEMORY,
    OPERATIONS,
    OPTIMIZER,
    Calibration,
    Piece,
    Pieces,
    RankSamples,
    Sample,
    collective_piece,
    ops_of,
    piece_names,
    samples_file,
)
from refshard.measure.load import cpu_name, watched_gpus
from refshard.measure.rank import describe, end_now, make_room
from refshard.measure.worker import PROGRESS_FILE, request_file

_REASON_LENGTH = 160


def calibrate_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    rank = int(os.environ["RANK"])
    calibration = msgspec.json.decode(request_file(folder, "calibration").read_bytes(), type=Calibration)
    torch.set_num_threads(calibration.threads)
    device = torch.device("cpu")
    if calibration.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://"))
    agreement = Agreement(PrefixStore("calibration", store), calibration.ranks)
    nodes = _nodes(calibration.ranks, rank, agreement)
    backend = "nccl" if calibration.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=calibration.ranks)
    try:
        Measurement(calibration, folder, rank, nodes, device, agreement).run()
        dist.barrier()
        return 0
    except OutOfStepError:
        assert dist.group.WORLD is not None
        end_now(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class OutOfStepError(Exception):
    """This rank failed in a collective, where the others wait for it: none can go on."""


def _nodes(ranks: int, rank: int, agreement: Agreement) -> int:
    """How many nodes the ranks are on.

    Raises:
        LaunchError: the nodes do not all hold as many ranks, one after the other.
    """
    local_rank, per_node = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not agreement.all_well(well=ranks % per_node == 0 and rank % per_node == local_rank):
        raise LaunchError(
            f"every node must hold the same number of consecutive ranks, but rank {rank} of {ranks} is local rank "
            f"{local_rank} of {per_node}; ask for as many on each, with Slurm by --ntasks-per-node and "
            "--distribution=block"
        )
    return ranks // per_node


@dataclass(frozen=True, slots=True)
class Ordered:
    """How a piece is measured; with ``collective``, all ranks have to come through it together."""

    measure: Callable[[], Iterator[Sample]]
    collective: bool = False
    sustained: bool = False


class Measurement:
    """What this rank measures, of which it keeps everything that it has."""

    def __init__(
        self, calibration: Calibration, folder: Path, rank: int, nodes: int, device: torch.device, agreement: Agreement
    ) -> None:
        self._calibration, self._folder, self._device, self._agreement = calibration, folder, device, agreement
        self._on_cpu = CpuStopwatch(calibration.pace, cpu_clock=calibration.cpu_clock)
        self._watch = self._on_cpu if device.type == "cpu" else CudaStopwatch(calibration.pace)
        self._groups = make_groups(calibration.ranks, nodes, rank)
        self._samples = _nothing_yet(calibration, rank, nodes, device)

    def run(self) -> None:
        """Measure everything, in all sweeps.

        Raises:
            OutOfStepError: this rank failed in a collective.
        """
        pieces = {**self._kernels(), **self._collectives()}
        names = piece_names(self._calibration, self._samples.nodes)
        assert set(names) == set(pieces)
        for number in range(1, self._calibration.sweeps + 1):
            self.begin_sweep()
            for name in names:
                if self._samples.rank == 0:
                    progress = f"sweep {number} of {self._calibration.sweeps}: {name}"
                    (self._folder / PROGRESS_FILE).write_text(progress)
                self._agreement.all_well()  # all ranks measure the same at the same time
                self.measure(name, pieces[name])

    def begin_sweep(self) -> None:
        """What is measured from now on is another sweep's."""
        self._keep((*self._samples.sweeps, {}))

    def measure(self, name: str, ordered: Ordered) -> None:
        """Measure one piece of the last sweep, and keep what was measured before it failed, if it does.

        Raises:
            OutOfStepError: it failed in a collective.
        """
        found: list[Sample] = []
        failure, out_of_step = "", False
        try:
            with watched_gpus(self._device if ordered.sustained else torch.device("cpu")) as use:
                for sample in ordered.measure():
                    found.append(sample)
            if use:
                gpu_use = {**self._samples.gpu_use, name: tuple(use)}
                self._samples = msgspec.structs.replace(self._samples, gpu_use=gpu_use)
        except FailedOnSomeRankError as error:
            failure = str(error)
        except Exception as error:
            failure, out_of_step = _reason(error), ordered.collective
        make_room(self._device)
        *before, sweep = self._samples.sweeps
        self._keep((*before, {**sweep, name: Piece(samples=tuple(found), failure=failure)}))
        if out_of_step:
            print(f"{name}: {failure}", file=sys.stderr)
            raise OutOfStepError

    def _keep(self, sweeps: tuple[Pieces, ...]) -> None:
        """Write all samples so far, at once: a reader sees the old file or the new one."""
        self._samples = msgspec.structs.replace(self._samples, sweeps=sweeps, busy=self._on_cpu.busy)
        path = samples_file(self._folder, self._samples.rank)
        replace_file(path, [msgspec.json.encode(self._samples).decode()])

    def _kernels(self) -> dict[str, Ordered]:
        watch, wanted, device = self._watch, self._calibration.shapes, self._device
        pieces = {
            OPERATIONS: Ordered(partial(kernels.time_operations, watch, wanted, device)),
            ELEMENTWISE: Ordered(partial(kernels.time_moves, watch.sustained, wanted, device), sustained=True),
            OPTIMIZER: Ordered(partial(kernels.time_optimizer, watch.sustained, wanted, device), sustained=True),
        }
        if device.type == "cpu":  # a caching allocator's memory is there already
            pieces[NEW_MEMORY] = Ordered(partial(kernels.time_first_touch, watch))
        for dtype in DTYPES:
            for kind, time in (("products", kernels.time_products), ("attention", kernels.time_attention)):
                burst, sustained = (partial(time, how, dtype, wanted, device) for how in (watch.burst, watch.sustained))
                pieces[f"{dtype} {kind}{IN_BURSTS}"] = Ordered(burst)
                pieces[f"{dtype} {kind}"] = Ordered(sustained, sustained=True)
        return pieces

    def _collectives(self) -> dict[str, Ordered]:
        calibration, device, agreement = self._calibration, self._device, self._agreement
        pieces = {
            collective_piece(op, *shape): Ordered(
                partial(time_collective, calibration, group, op, device, agreement), collective=True
            )
            for shape, group in self._groups.items()
            for op in ops_of(calibration, group.ranks)
        }
        if world := dist.group.WORLD if self._groups else None:
            pieces[BESIDE] = Ordered(partial(measure_beside, calibration, world, device, agreement), collective=True)
        return pieces


def _nothing_yet(calibration: Calibration, rank: int, nodes: int, device: torch.device) -> RankSamples:
    about: dict[str, object] = {}
    if device.type == "cuda":
        limits = torch.cuda.get_device_properties(device)
        about = {
            "machine": torch.cuda.get_device_name(device),
            "memory_bytes": limits.total_memory,
            "multiprocessors": limits.multi_processor_count,
            "capability": torch.cuda.get_device_capability(device),
        }
    else:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        about = {"machine": cpu_name(), "memory_bytes": pages // (calibration.ranks // nodes * calibration.nodes_here)}
    return RankSamples(rank=rank, nodes=nodes, torch=str(torch.__version__), backend=dist.get_backend(), **about)  # type: ignore[arg-type]


def _reason(error: Exception) -> str:
    """Where and why it failed, in a line."""
    places = [f"{note}: " for note in getattr(error, "__notes__", ())]
    return textwrap.shorten("".join([*places, describe(error)]), _REASON_LENGTH, placeholder=" ...")
