"""What an operator that computes little takes: its bytes at the memory's rate, times what its kernel makes of it.

Few kernels reach what a plain copy does. Some read their input twice, some leave bandwidth unused, and pointwise
kernels on tensors that do not lie alike in memory compute an address for each element. The constants were fitted to
kernels of one H200 under torch 2.11 (``python -m tests.gpu.quick.fit``); ``docs/explanation/gpu-validation.md`` has the
errors.
"""

from refshard.costs import move_seconds
from refshard.dryrun.recording import Flag
from refshard.dryrun.signatures import element_bytes, parse
from refshard.specs.hardware import HardwareSpec

TIMES = {
    "_log_softmax": 1.92, "_log_softmax_backward_data": 1.36, "_fused_rms_norm": 1.55, "_fused_rms_norm_backward": 2.28,
    "_chunk_cat": 2.08, "_foreach_copy_": 1.95, "sum": 2.1, "embedding_dense_backward": 2.1, "silu": 1.16,
    "silu_backward": 1.05, "add": 0.89, "add_": 0.89, "mul": 0.91, "mul_": 0.91, "index": 1.5, "index_add": 13.0,
    "_index_put_impl_": 5.2,
}  # fmt: skip
"""By operator, how many times as long as a copy of as many bytes; 1 where none is given."""
WIDENED, NARROWED = 2.0, 0.94
"""The same for copies to a wider and to a narrower dtype."""
STRIDED_PER_MULTIPROCESSOR = 1.9e9
"""Elements a second of a kernel that computes addresses, each multiprocessor's share."""


def operator_seconds(
    hardware: HardwareSpec, operator: str, signature: str, flags: int, reads: int, writes: int
) -> float:
    """What a launch of ``operator`` takes that reads and writes so many bytes.

    Gradients of the loss are written only, whatever tensors their operator is given.
    """
    _, _, op = operator.rpartition("::")
    nbytes = float(writes if op in ("nll_loss_backward", "nll_loss2d_backward") else reads + writes)
    times = _copied(signature) if op == "copy_" else TIMES.get(op, 1.0)
    seconds = move_seconds(hardware, times * nbytes)
    if flags & Flag.STRIDED and hardware.multiprocessors:
        elements = max((tensor.numel for tensor in parse(signature).inputs), default=0)
        seconds = max(seconds, elements / (STRIDED_PER_MULTIPROCESSOR * hardware.multiprocessors))
    return seconds


def _copied(signature: str) -> float:
    """Of a copy, whose signature has the result first."""
    to, given = (element_bytes(tensor.dtype) for tensor in parse(signature).inputs)
    return WIDENED if to > given else NARROWED if to < given else 1.0
