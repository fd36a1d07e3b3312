"""What a dry run got wrong about a real step of the same job: its trace beside the real one.

Both sides are matched as in :mod:`refshard.analysis.difference`, without phases, since a dry run calls recomputation
forward and a trace backward, and without telling computation from copies, since the copy of a tensor is a kernel in one
and a call of the driver in the other. Each part belongs to the number of the profile that its price comes from.
"""

from collections.abc import Sequence

import msgspec

from refshard.analysis.attribution import IDLE, Attribution, Owner, class_of_work
from refshard.analysis.difference import Change, Difference, difference
from refshard.events.timeline import Kind

HOST = "host_s"
_IDLE = {
    "launch": ("idle, launch-bound", HOST), "call": ("idle, blocked call", HOST),
    "back to back": ("idle, back to back", "kernel_s"), "dependency": ("idle, waiting for a stream", ""),
}  # fmt: skip
"""By cause: its name, and the number of the profile that idle time follows from."""
_HOST_COPIES = ("HtoD", "DtoH")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of time in both steps, in nanoseconds per step; ``constant`` of the profile governs its prediction."""

    name: str
    constant: str
    real_ns: float
    predicted_ns: float

    @property
    def error_ns(self) -> float:
        """Predicted less real."""
        return self.predicted_ns - self.real_ns


def beside(real: Sequence[Attribution], predicted: Sequence[Attribution], ranks: Sequence[int] = ()) -> Difference:
    """The difference from the real steps (A) to the predicted ones (B), as :func:`difference` gives it.

    Raises:
        ValueError: as that.
    """
    return difference([_alike(one) for one in real], [_alike(one) for one in predicted], ranks)


def _alike(side: Attribution) -> Attribution:
    """Without what a dry run and a trace tell differently; idle time by its cause alone."""
    found: dict[object, Owner] = {}
    for owner in side.owners:
        work = msgspec.structs.replace(owner.work, phase=None)
        if work.kind == IDLE:
            work = msgspec.structs.replace(work, operator="", unit=None, dims="", dtype="", ordinal=None, bytes=None,
                                           group=None, by_name=False)  # fmt: skip
        elif work.kind != Kind.COMM:
            work = msgspec.structs.replace(work, kind=Kind.COMPUTE.value)
            if class_of_work(work) == "elementwise":  # autograd adds gradients in place or not
                work = msgspec.structs.replace(work, operator=work.operator.removesuffix("_"))
        old = found.get(work, Owner(work=work, ns=0, count=0))
        kernels = (*old.kernels, *owner.kernels)
        found[work] = Owner(work=work, ns=old.ns + owner.ns, count=old.count + owner.count, kernels=kernels)
    return Attribution(step_ns=side.step_ns, owners=tuple(found.values()))


def part_of(change: Change) -> tuple[str, str]:
    """The kind of time that a change is of, and the number of the profile that governs it."""
    work = change.work
    if work.kind == IDLE:
        return _IDLE.get(work.bound or "", ("idle, cause unknown", ""))
    if work.kind == Kind.COMM:
        return "communication, exposed", "within, between"
    if any(name.startswith("Memcpy") and any(way in name for way in _HOST_COPIES) for name in change.a_kernels):
        return "copies to and from the host", "host_link_bytes_per_s"
    kind, dtype = class_of_work(work), work.dtype.partition(",")[0].partition(" ")[0]
    rate = "bf16" if dtype in ("", "fp16") else dtype
    match kind:
        case "GEMM" | "convolution":
            return f"matrix products, {rate}" if kind == "GEMM" else kind, f"matmul.{rate}.efficiency"
        case "attention":
            return f"attention{', backward' * ('backward' in work.operator)}", f"attention_points, attention.{rate}"
        case "optimizer":
            return "optimizer", "optimizer_bytes_per_s"
    return {"copies": "copies on the device", "others": "other kernels"}.get(kind, kind), "memory_bytes_per_s"


def parts(found: Difference) -> list[Part]:
    """The step by kind of time, the largest error first; they add up to both steps."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for change in found.changes:
        a_ns, b_ns = sums.get(key := part_of(change), (0.0, 0.0))
        sums[key] = (a_ns + change.a_ns, b_ns + change.b_ns)
    made = [Part(name=n, constant=c, real_ns=a, predicted_ns=b) for (n, c), (a, b) in sums.items()]
    return sorted(made, key=lambda part: (-abs(part.error_ns), part.name))
