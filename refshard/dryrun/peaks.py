"""Peaks of a device's memory over a whole run: torch's own begin anew each time that a script resets them."""

import msgspec
import torch

from refshard.dryrun.request import Pool


class Peaks:
    """Remembers what torch's statistics of ``device`` said before each reset."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._before = Pool(allocated=0, active=0, reserved=0, requested=0)

    def install(self) -> None:
        """Look at the statistics before every reset, for the life of this process."""
        reset = torch._C._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:
            self._before = self.highest()
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset

    def highest(self) -> Pool:
        """The highest of each, in bytes."""
        now = pool(self._device, "peak")
        return Pool(**{name: max(getattr(self._before, name), getattr(now, name)) for name in Pool.__struct_fields__})


def pool(device: int, which: str) -> Pool:
    """The "current" or "peak" bytes of torch's statistics."""
    torch.cuda.init()  # before which there are none
    stats = torch.cuda.memory_stats(device)
    return msgspec.convert({name: stats[f"{name}_bytes.all.{which}"] for name in Pool.__struct_fields__}, Pool)
