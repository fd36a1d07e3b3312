"""What one accelerator, or one core of a CPU, can do, and the profiles that ship with refshard."""

from typing import Literal

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.specs.reading import convert, read_toml, sourced

Dtype = Literal["fp32", "bf16"]
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast one kind of kernel runs in one dtype, as far as it is known.

    ``peak`` is the data sheet's dense rate in FLOP/s (on a CPU: the best that was measured), and what MFU is held
    against. A product of ``flops`` takes ``flops / (peak * efficiency) + overhead_s``, so small ones are slow.
    """

    peak: float
    efficiency: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise ValueError(f"peak must be > 0, got {self.peak}")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency must lie in (0, 1], got {self.efficiency}")
        if self.overhead_s < 0:
            raise ValueError(f"overhead_s must be >= 0, got {self.overhead_s}")


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, or one rank's share of a CPU. ``sources`` says of each field where its value comes from.

    ``matmul`` and ``attention`` are by dtype (fp32, bf16). ``memory_bytes_per_s`` is what elementwise kernels reach,
    bytes read and written. ``kernel_s`` is the least that any kernel takes, ``host_s`` what the host needs to launch
    one. On hardware that is ``asynchronous`` the host runs ahead of the device (CUDA); elsewhere it is the device.
    ``multiprocessors`` is 0 where there is no such thing.
    """

    device: Literal["cuda", "cpu"]
    memory_bytes: int
    memory_bytes_per_s: float
    matmul: dict[Dtype, Rate]
    attention: dict[Dtype, Rate]
    kernel_s: float
    host_s: float
    multiprocessors: int = 0
    sources: dict[str, str]

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "memory_bytes_per_s"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be > 0, got {getattr(self, field)}")
        for field in ("kernel_s", "host_s", "multiprocessors"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be >= 0, got {getattr(self, field)}")
        if self.matmul.keys() != self.attention.keys() or not self.matmul:
            raise ValueError(
                f"matmul and attention must give the same dtypes, at least one, got {sorted(self.matmul)} and "
                f"{sorted(self.attention)}"
            )
        sourced(self, exempt=("device", "sources"))

    @property
    def asynchronous(self) -> bool:
        """Whether the host runs ahead of the device."""
        return self.device == "cuda"


def load_hardware(name: str) -> HardwareSpec:
    """Read the profile ``name`` from ``profiles/hardware/``.

    Raises:
        SpecError: there is no such profile.
    """
    profiles = resources.hardware_profiles()
    if name not in profiles:
        raise SpecError(f"hardware: no profile '{name}'; {nearest(name, list(profiles))}")
    return convert(read_toml(profiles[name]), HardwareSpec, where=f"hardware {name}")
