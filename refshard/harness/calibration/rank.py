"""One rank of a calibration.

It reads ``FOLDER/calibration.json``, measures together with all others and leaves ``FOLDER/samples-rank<r>.json``.
Like a rank of a case it imports torch, numpy and msgspec and nothing heavier.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from refshard.harness.calibration import kernels
from refshard.harness.calibration.collectives import groups, measure_beside, time_collectives
from refshard.harness.calibration.samples import (
    CALIBRATION_FILE,
    Beside,
    Calibration,
    RankSamples,
    TimedCollective,
    median_of,
    samples_file,
)
from refshard.harness.calibration.stopwatch import CpuStopwatch, CudaStopwatch, Stopwatch
from refshard.harness.rank import PROGRESS_FILE

T = TypeVar("T")


def calibrate_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    rank = int(os.environ["RANK"])
    calibration = msgspec.json.decode((folder / CALIBRATION_FILE).read_bytes(), type=Calibration)
    torch.set_num_threads(calibration.threads)
    device = torch.device("cpu")
    if calibration.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if calibration.device == "cuda" else "gloo")
    try:
        measurement = _Measurement(calibration, folder, rank, device)
        samples = median_of([measurement.sweep(number) for number in range(1, calibration.sweeps + 1)])
        samples_file(folder, rank).write_bytes(msgspec.json.encode(samples))
        dist.barrier()
        return 0
    finally:
        dist.destroy_process_group()


class _Measurement:
    def __init__(self, calibration: Calibration, folder: Path, rank: int, device: torch.device) -> None:
        self._calibration, self._folder, self._rank, self._device = calibration, folder, rank, device
        self._shapes = kernels.shapes(device.type, quick=calibration.quick)
        self._groups = list(groups(calibration, rank)) if calibration.ranks > 1 else []
        self._sweep = 0

    def sweep(self, number: int) -> RankSamples:
        """Measure everything once, for the ``number``-th time."""
        self._sweep = number
        wanted, device = self._shapes, self._device
        budget_s, least = 0.02 if self._calibration.quick else 0.06, 3
        on_cpu = CpuStopwatch(budget_s, least, cpu_clock=self._calibration.cpu_clock)
        watch: Stopwatch = on_cpu if device.type == "cpu" else CudaStopwatch(budget_s, least)
        kernel_s, host_s = self._all_at_once("operations", lambda: kernels.time_operations(watch, wanted, device))
        products, attention = [], []
        for dtype in kernels.DTYPES:
            products += self._all_at_once(
                f"{dtype} products", partial(kernels.time_products, watch, dtype, wanted, device)
            )
            attention += self._all_at_once(
                f"{dtype} attention", partial(kernels.time_attention, watch, dtype, wanted, device)
            )
        moves, transcendentals = self._all_at_once("elementwise", lambda: kernels.time_moves(watch, wanted, device))
        optimizer_s = self._all_at_once("optimizer", lambda: kernels.time_optimizer(watch, wanted, device))
        first_touch_s = self._all_at_once("new memory", lambda: kernels.time_first_touch(watch, device))
        return RankSamples(
            rank=self._rank,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            backend=dist.get_backend(),
            **self._device_limits(),
            kernel_s=kernel_s,
            host_s=host_s,
            products=tuple(products),
            attention=tuple(attention),
            moves=tuple(moves),
            transcendentals=tuple(transcendentals),
            optimizer_s_per_parameter=optimizer_s,
            first_touch_s_per_byte=first_touch_s,
            collectives=tuple(self._collectives()),
            beside=self._beside(),
            busy=on_cpu.busy if device.type == "cpu" else 1.0,
        )

    def _all_at_once(self, phase: str, measure: Callable[[], T]) -> T:
        """Measure while all other ranks measure the same."""
        if self._rank == 0:
            (self._folder / PROGRESS_FILE).write_text(f"sweep {self._sweep} of {self._calibration.sweeps}: {phase}")
        dist.barrier()
        return measure()

    def _collectives(self) -> Iterator[TimedCollective]:
        for group in self._groups:
            phase = f"collectives of {group.ranks} ranks on {group.nodes} node{'s' if group.nodes > 1 else ''}"
            yield from self._all_at_once(phase, partial(time_collectives, self._calibration, group, self._device))

    def _beside(self) -> Beside:
        group = dist.group.WORLD
        if self._calibration.ranks == 1 or group is None:
            return Beside(compute=1.0, communication=1.0)
        return self._all_at_once(
            "products beside collectives", lambda: measure_beside(self._calibration, group, self._device)
        )

    def _device_limits(self) -> dict[str, int]:
        """Memory that a rank has, and multiprocessors."""
        if self._device.type == "cuda":
            limits = torch.cuda.get_device_properties(self._device)
            return {"memory_bytes": limits.total_memory, "multiprocessors": limits.multi_processor_count}
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"memory_bytes": pages // self._calibration.ranks, "multiprocessors": 0}
