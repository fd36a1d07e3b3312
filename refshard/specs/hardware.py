"""What one accelerator, or one rank's share of a CPU, can do, and the profiles that ship with refshard."""

from typing import Literal

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.specs.reading import convert, finite, read_toml, sourced, within

Dtype = Literal["fp32", "bf16"]
ProductDtype = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]
"""Dtype of a matrix product's operands: fp8 with a scale for a tensor or a row, MXFP8 with one for each 32 elements,
NVFP4 with one for each 16. Only products are in these: activations, attention and masters are not.
"""
LOW_BYTES: dict[ProductDtype, float] = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element of an operand, with its part of a scale, in the dtypes that only products have."""
AttentionKernel = Literal["flash", "efficient", "cudnn", "triton"]
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast one kind of kernel runs in one dtype, as far as it is known.

    ``peak`` is the data sheet's dense rate in FLOP/s (on a CPU: the best that was measured), and the base of MFU.
    ``peak * efficiency`` is what a large product reaches in training; small ones are slower by ``overhead_s`` each, and
    if operands are not loaded during the computation, by their bytes at ``bytes_per_s`` (0: they are).
    """

    peak: float
    efficiency: float
    overhead_s: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        finite("peak", self.peak, above=0)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency must lie in (0, 1], got {self.efficiency}")
        finite("overhead_s", self.overhead_s)
        finite("bytes_per_s", self.bytes_per_s)

    @property
    def flops_per_s(self) -> float:
        """What a large product reaches."""
        return self.peak * self.efficiency


class AttentionPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Causal attention as it was measured, since no single rate describes its kernels at all lengths.

    ``forward_s`` and ``backward_s`` are seconds per score: a query head times a pair of tokens in the causal half, of
    which a sequence of T tokens has T * T / 2. Without a ``kernel``, they are those of the kernel that torch chose.
    """

    dtype: Dtype
    head_dim: int
    seq_len: int
    forward_s: float
    backward_s: float
    kernel: AttentionKernel | None = None

    def __post_init__(self) -> None:
        for field in ("head_dim", "seq_len"):
            within(field, getattr(self, field), 1)
        for field in ("forward_s", "backward_s"):
            finite(field, getattr(self, field), above=0)


class ClosedForms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What closed forms take in place of measured rates: averages over training steps, fitted to published runs.

    Closed forms do not tell kernels apart, and steps of large clusters lose time that they have no term for. 0: as
    measured.
    """

    memory_bytes_per_s: float = 0.0
    bf16_efficiency: float = 0.0

    def __post_init__(self) -> None:
        finite("memory_bytes_per_s", self.memory_bytes_per_s)
        if not 0 <= self.bf16_efficiency <= 1:
            raise ValueError(f"bf16_efficiency must lie in [0, 1], got {self.bf16_efficiency}")


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, or one rank's share of a CPU. ``sources`` says of each field where its value comes from.

    ``matmul`` and ``attention`` are by dtype (fp32, bf16), ``matmul`` also those of :data:`LOW_BYTES`, where they are
    known; attention's FLOPs are those of the causal half, backward 2.5 times forward, and ``attention_points`` go
    before its rate. That rate is FlashAttention's; ``attention_kernels`` says how many times as fast another of torch's
    kernels runs (1 where it is not listed). ``memory_bytes_per_s`` is what elementwise kernels reach, bytes read and
    written, on tensors that no cache holds. ``transcendental_per_s`` is how many exponentials a second such a kernel
    gets done (0: memory is slower), ``optimizer_bytes_per_s`` what a fused AdamW reaches (0: as any elementwise
    kernel), ``first_touch_bytes_per_s`` how fast the system provides memory that the process did not have (0: at once,
    as a caching allocator does), ``host_link_bytes_per_s`` what a copy between pinned memory of the host and the device
    reaches (0: unknown). ``kernel_s`` is what any kernel takes however little it does, ``host_s`` what the host needs
    per kernel of a small decoder layer, forward and backward, with all of torch and Python that leads to it. On
    hardware that is ``asynchronous`` the host runs ahead of the device (CUDA); elsewhere it is the device, and both are
    the cost of one eager operation. ``multiprocessors`` is 0 where there is no such thing. ``device_name`` and
    ``capability`` (major, minor) are what torch.cuda reports of it; ``also_named`` are further names of devices with
    the same peaks. ``tf32_peak`` is the dense rate of fp32 products whose operands tensor cores round to TF32, which
    torch does only if allowed (0: unknown). ``memory_peak_bytes_per_s`` is the bandwidth of the memory by the data
    sheet, which rooflines are drawn with (0: unknown).

    ``closed_forms`` are what closed forms take in place of some of these numbers. ``matmul`` and ``attention`` are
    what a device sustains. ``matmul_burst`` and ``attention_burst`` are what it reached in short bursts, before
    power and temperature brought its clocks down; nothing is predicted from these.
    """

    device: Literal["cuda", "cpu"]
    memory_bytes: int
    memory_bytes_per_s: float
    matmul: dict[ProductDtype, Rate]
    attention: dict[Dtype, Rate]
    kernel_s: float
    host_s: float
    multiprocessors: int = 0
    transcendental_per_s: float = 0.0
    optimizer_bytes_per_s: float = 0.0
    first_touch_bytes_per_s: float = 0.0
    host_link_bytes_per_s: float = 0.0
    attention_points: tuple[AttentionPoint, ...] = ()
    attention_kernels: dict[AttentionKernel, float] = {}
    tf32_peak: float = 0.0
    memory_peak_bytes_per_s: float = 0.0
    matmul_burst: dict[ProductDtype, Rate] = {}
    attention_burst: dict[Dtype, Rate] = {}
    closed_forms: ClosedForms | None = None
    device_name: str = ""
    also_named: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)
    about: str = ""
    sources: dict[str, str]

    def __post_init__(self) -> None:
        within("memory_bytes", self.memory_bytes, 1, most=2**60)
        finite("memory_bytes_per_s", self.memory_bytes_per_s, above=0)
        optional = (
            "transcendental_per_s", "optimizer_bytes_per_s", "first_touch_bytes_per_s",
            "host_link_bytes_per_s",
        )  # fmt: skip
        for field in ("kernel_s", "host_s", "tf32_peak", "memory_peak_bytes_per_s", *optional):
            finite(field, getattr(self, field))
        within("multiprocessors", self.multiprocessors, 0)
        if self.matmul.keys() - LOW_BYTES.keys() != self.attention.keys() or not self.attention:
            raise ValueError(
                "matmul and attention must give the same dtypes, at least one, besides matmul's fp8, mxfp8 and nvfp4, "
                "got "
                f"{sorted(self.matmul)} and {sorted(self.attention)}"
            )
        for kernel, times in self.attention_kernels.items():
            finite(f"attention_kernels.{kernel}", times, above=0)
        sourced(self, exempt=("device", "device_name", "also_named", "capability", "about", "sources"))

    @property
    def as_in_closed_forms(self) -> "HardwareSpec":
        """The hardware with the numbers that closed forms take."""
        found, rates = self.closed_forms or ClosedForms(), dict(self.matmul)
        if found.bf16_efficiency:
            rates["bf16"] = msgspec.structs.replace(rates["bf16"], efficiency=found.bf16_efficiency)
        return msgspec.structs.replace(
            self, memory_bytes_per_s=found.memory_bytes_per_s or self.memory_bytes_per_s, matmul=rates
        )

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


def profile_of_device(device_name: str) -> str | None:
    """The name of the profile with the peaks of the device that torch.cuda calls ``device_name``, if any."""
    for name in resources.hardware_profiles():
        profile = load_hardware(name)
        if device_name and device_name in (profile.device_name, *profile.also_named):
            return name
    return None
