"""The peaks that an operator's rate is held against, by the device's name, and the roofline that they make."""

import re
from functools import cache
from typing import Literal

import msgspec

from refshard.specs.hardware import load_hardware, profile_of_device

TF32_KERNEL = re.compile(r"tf32|tensorop_s1688|xf32", re.IGNORECASE)
"""Kernels whose names say that they round fp32 operands to TF32 for the tensor cores."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """A device's data sheet: FLOP/s of products by their operands' type, and bytes/s of memory (None: unknown)."""

    profile: str
    flops: dict[str, float]
    memory: float | None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """How close some work comes to the peaks; ``reason`` says why that is unknown."""

    of_peak: float | None = None
    of_roofline: float | None = None
    bound: Literal["compute", "memory"] | None = None
    reason: str | None = None


@cache
def peaks_of(device: str) -> Peaks | None:
    """The peaks of the device of this name; None where no profile is of it."""
    name = profile_of_device(device)
    if name is None:
        return None
    spec = load_hardware(name)
    flops: dict[str, float] = {dtype: rate.peak for dtype, rate in spec.matmul.items()}
    if "bf16" in flops:
        flops["fp16"] = flops["bf16"]  # one rate on every device that has a profile
    if spec.tf32_peak:
        flops["tf32"] = spec.tf32_peak
    return Peaks(profile=name, flops=flops, memory=spec.memory_peak_bytes_per_s or None)


def roofline(
    peaks: Peaks | None, device: str, *, dtype: str | None, flops: int | None, size: int | None, seconds: float,
    tf32: bool,
) -> Roofline:  # fmt: skip
    """Hold work of ``flops`` and ``size`` bytes that took ``seconds`` against the peaks.

    A product of fp32 operands is held against TF32's peak if its kernel's name says so, or if it was faster than fp32
    can be.
    """
    if not seconds or (flops is None and size is None):
        return Roofline(reason="no formula for this operator")
    if peaks is None:
        return Roofline(reason=f"no hardware profile of {device}")
    peak = peaks.flops.get(dtype or "")
    if flops and dtype == "fp32" and peak and (tf32 or flops / seconds > peak):
        peak = peaks.flops.get("tf32")
    if flops and peak is None:
        return Roofline(reason=f"{peaks.profile} has no peak for {dtype}")
    of_peak = flops / seconds / peak if flops and peak else None
    if size is None or peaks.memory is None:
        return Roofline(of_peak=of_peak, reason=f"{peaks.profile} has no peak of memory")
    of_memory = size / seconds / peaks.memory
    bound: Literal["compute", "memory"] = "compute" if (of_peak or 0.0) > of_memory else "memory"
    return Roofline(of_peak=of_peak, of_roofline=max(of_peak or 0.0, of_memory), bound=bound)
