"""One rank of a calibration.

It reads ``FOLDER/calibration.json``, measures piece by piece together with all others, and writes its samples so far to
``FOLDER/samples-rank<r>.json`` after each. Like a rank of a case it imports torch, numpy and msgspec and nothing
heavier.
"""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    Shapes,
    collective_piece,
    groups_of,
    ops_of,
    samples_file,
)
from refshard.measure.load import cpu_name, watched_gpus
from refshard.measure.rank import describe, end_now, make_room
from refshard.measure.worker import PROGRESS_FILE, request_file
from refshard.specs.cluster import CollectiveOp
from refshard.specs.hardware import Dtype

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
    """This rank failed in a collective, in which the others wait: none can go on."""


def _nodes(ranks: int, rank: int, agreement: Agreement) -> int:
    """The number of nodes.

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


Timer = Callable[[kernels.Timing, Dtype, Shapes, torch.device], Iterator[Sample]]


@dataclass(frozen=True, slots=True)
class Ordered:
    """How a piece is measured; all ranks must complete a ``collective`` one together."""

    measure: Callable[["Measurement"], Iterator[Sample]]
    collective: bool = False
    sustained: bool = False


def pieces_of(calibration: Calibration, nodes: int) -> dict[str, Ordered]:
    """Everything that a sweep measures, in order."""
    wanted = calibration.shapes

    def of_dtype(dtype: Dtype) -> dict[str, Ordered]:
        def in_burst(time: Timer) -> Ordered:
            return Ordered(lambda m: time(m.watch.burst, dtype, wanted, m.device))

        def sustained(time: Timer) -> Ordered:
            return Ordered(lambda m: time(m.watch.sustained, dtype, wanted, m.device), sustained=True)

        return {
            f"{dtype} products{IN_BURSTS}": in_burst(kernels.time_products),
            f"{dtype} products": sustained(kernels.time_products),
            f"{dtype} attention{IN_BURSTS}": in_burst(kernels.time_attention),
            f"{dtype} attention": sustained(kernels.time_attention),
        }

    def of_group(op: CollectiveOp, shape: tuple[int, int]) -> Ordered:
        return Ordered(
            lambda m: time_collective(calibration, m.groups[shape], op, m.device, m.agreement), collective=True
        )

    pieces = {
        OPERATIONS: Ordered(lambda m: kernels.time_operations(m.watch, wanted, m.device)),
        **of_dtype(DTYPES[0]),
        ELEMENTWISE: Ordered(lambda m: kernels.time_moves(m.watch.sustained, wanted, m.device), sustained=True),
        OPTIMIZER: Ordered(lambda m: kernels.time_optimizer(m.watch.sustained, wanted, m.device), sustained=True),
    }
    if calibration.device == "cpu":  # a caching allocator's memory is there already
        pieces[NEW_MEMORY] = Ordered(lambda m: kernels.time_first_touch(m.watch))
    pieces |= of_dtype(DTYPES[1])
    for shape in groups_of(calibration.ranks, nodes):
        pieces |= {collective_piece(op, *shape): of_group(op, shape) for op in ops_of(calibration, shape[0])}
    if calibration.ranks > 1:
        pieces[BESIDE] = Ordered(lambda m: measure_beside(calibration, m.device, m.agreement), collective=True)
    return pieces


class Measurement:
    """What this rank measures; it keeps everything measured so far."""

    def __init__(
        self, calibration: Calibration, folder: Path, rank: int, nodes: int, device: torch.device, agreement: Agreement
    ) -> None:
        self.device, self.agreement = device, agreement
        self._calibration, self._folder = calibration, folder
        self._on_cpu = CpuStopwatch(calibration.pace, cpu_clock=calibration.cpu_clock)
        self.watch = self._on_cpu if device.type == "cpu" else CudaStopwatch(calibration.pace)
        self.groups = make_groups(calibration.ranks, nodes, rank)
        self._samples = _nothing_yet(calibration, rank, nodes, device)

    def run(self) -> None:
        """Measure everything, in all sweeps.

        Raises:
            OutOfStepError: this rank failed in a collective.
        """
        for number in range(1, self._calibration.sweeps + 1):
            self.begin_sweep()
            for name, ordered in pieces_of(self._calibration, self._samples.nodes).items():
                if self._samples.rank == 0:
                    progress = f"sweep {number} of {self._calibration.sweeps}: {name}"
                    (self._folder / PROGRESS_FILE).write_text(progress)
                self.agreement.all_well()  # all ranks measure the same at the same time
                self.measure(name, ordered)

    def begin_sweep(self) -> None:
        """Start another sweep."""
        self._keep((*self._samples.sweeps, {}))

    def measure(self, name: str, ordered: Ordered) -> None:
        """Measure one piece of the last sweep; if it fails, keep what was measured before.

        Raises:
            OutOfStepError: it failed in a collective.
        """
        found: list[Sample] = []
        failure, out_of_step = "", False
        try:
            with watched_gpus(self.device if ordered.sustained else torch.device("cpu")) as use:
                for sample in ordered.measure(self):
                    found.append(sample)
            if use:
                gpu_use = {**self._samples.gpu_use, name: tuple(use)}
                self._samples = msgspec.structs.replace(self._samples, gpu_use=gpu_use)
        except FailedOnSomeRankError as error:
            failure = str(error)
        except Exception as error:
            where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
            failure = textwrap.shorten(where + describe(error), _REASON_LENGTH, placeholder=" ...")
            out_of_step = ordered.collective
        make_room(self.device)
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
