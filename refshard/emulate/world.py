"""The world that one process is a rank of: its cluster, its links, and how they take their time on each device."""

import weakref
from collections.abc import Callable

import torch

from refshard.emulate.cores import SharedClock
from refshard.emulate.delay import Clock, Delay, HostClock, HostDelay, Tally
from refshard.emulate.links import Links
from refshard.emulate.streams import CudaDevice, Device, StreamDelay
from refshard.quantities import format_seconds
from refshard.specs.cluster import ClusterSpec

_AT_ONCE = {"nccl": 1, "rccl": 1, "gloo": 2}
"""Collectives of one group that a library runs at a time: a communicator one, gloo as many as it has threads."""


class EmulatedWorld:
    """``world_size`` ranks of a cluster: this process is one, the others are modelled.

    All groups of the process share its links. ``meet``, if given, is called in a barrier, for processes that are other
    ranks of the same world to wait for each other there. ``multiprocessors`` are what a collective holds on CUDA while
    it runs; if not given, the share that compute loses during communication, by the profile.

    Raises:
        SpecError: the ranks would fill the cluster's last node in part, or nothing joins its nodes.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        rank: int,
        world_size: int,
        clock: Clock | None = None,
        meet: Callable[[], None] | None = None,
        multiprocessors: int | None = None,
    ) -> None:
        self.cluster = cluster.of_world_size(world_size)
        self.rank, self.world_size, self.meet = rank, world_size, meet
        self._clock, self._multiprocessors = clock or self._host_clock(), multiprocessors
        self._links = Links()
        self._devices: dict[torch.device, Device] = {}
        self._delays: list[Delay] = []
        # At the latest when the interpreter ends: it must not end threads that are inside of torch.
        self._finalizer = weakref.finalize(self, _close, self._delays)

    @property
    def library(self) -> str:
        """The library that the backend emulates, by torch's name: torch calls rccl nccl."""
        return "nccl" if self.cluster.library == "rccl" else self.cluster.library

    def delay(self, device: torch.device) -> Delay:
        """How the collectives of one more group take their time on ``device``."""
        made: Delay
        if device.type == "cuda":
            if device not in self._devices:
                self._devices[device] = CudaDevice(device, self._held())
            made = StreamDelay(self._devices[device])
        else:
            made = HostDelay(self._links, self._clock, at_once=_AT_ONCE[self.cluster.library])
        self._delays.append(made)
        return made

    def _host_clock(self) -> Clock:
        compute, communication = self.cluster.compute_beside_communication, self.cluster.communication_beside_compute
        return HostClock() if compute == communication == 1 else SharedClock(compute, communication)

    def _held(self) -> int:
        if self._multiprocessors is not None:
            return self._multiprocessors
        lost = 1 - self.cluster.compute_beside_communication
        return max(1, round(lost * self.cluster.accelerator.multiprocessors))

    def remark(self) -> str:
        """What is doubtful about the times so far; empty if nothing is."""
        each = (delay.tally for delay in self._delays)
        total = sum(each, sum((device.tally() for device in self._devices.values()), Tally()))
        if not total.late:
            return ""
        return (
            f"local copies took longer than the modelled network in {total.late} of {total.collectives} collectives, "
            f"by {format_seconds(total.late_ns * 1e-9)} in total"
        )

    def close(self) -> None:
        """End what runs collectives."""
        self._finalizer()


def _close(delays: list[Delay]) -> None:
    for delay in delays:
        delay.close()
