"""What a Llama computes, kernel by kernel: the floating-point operations and the bytes of each.

The lists follow ``models/llama.py`` as torch runs it, eager or compiled. A matrix product reads and writes memory too,
but products of this size are bound by arithmetic; everything else is bound by memory. Suffixes as there: n tokens, D
model width, F feed-forward width, K key-value width, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from refshard.specs.hardware import ELEMENT_BYTES, Dtype, HardwareSpec
from refshard.specs.model import ModelSpec

Work = Literal["matmul", "attention", "move"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: ``amount`` is FLOPs of a matrix product or of attention, or bytes read and written."""

    name: str
    work: Work
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank computes at once: ``sequences`` of ``seq_len`` tokens in ``dtype``, eager or compiled."""

    sequences: int
    seq_len: int
    dtype: Dtype
    compiled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.sequences * self.seq_len

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return ELEMENT_BYTES[self.dtype]


def seconds(kernels: Iterable[Kernel], hardware: HardwareSpec, dtype: Dtype) -> float:
    """What the kernels take one after the other; where the host launches them more slowly, what that takes."""
    listed = tuple(kernels)
    device = sum(_kernel_seconds(kernel, hardware, dtype) for kernel in listed)
    return max(device, len(listed) * hardware.host_s) if hardware.asynchronous else device


def _kernel_seconds(kernel: Kernel, hardware: HardwareSpec, dtype: Dtype) -> float:
    if kernel.work == "move":
        return hardware.kernel_s + kernel.amount / hardware.memory_bytes_per_s
    rate = (hardware.matmul if kernel.work == "matmul" else hardware.attention)[dtype]
    return hardware.kernel_s + rate.overhead_s + kernel.amount / (rate.peak * rate.efficiency)


def block_forward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """One decoder layer, forward."""
    n, D, F, K = batch.tokens, model.dim, model.ffn_dim, model.n_kv_heads * model.head_dim
    norm, add = _moved(batch, 2 * n * D), _moved(batch, 3 * n * D)
    products = (
        _product("q", n, D, D), _product("k", n, D, K), _product("v", n, D, K), _product("o", n, D, D),
        _product("gate", n, D, F), _product("up", n, D, F), _product("down", n, F, D),
    )  # fmt: skip
    attention = Kernel("attention", "attention", _attention_flops(model, batch))
    if batch.compiled:
        # Each norm with the residual addition before it, the rotation at once, the gate's product at once.
        fused = (_moved(batch, 4 * n * D), _moved(batch, 4 * n * D), _moved(batch, 2 * n * (D + K)))
        moves = [*fused, _moved(batch, 3 * n * F)]
    else:
        rotation = [_moved(batch, times * n * width) for width in (D, K) for times in (2, 2, 3)]
        moves = [norm, *rotation, add, norm, _moved(batch, 2 * n * F), _moved(batch, 3 * n * F), add]
    return (*products, attention, *(Kernel("elementwise", "move", bytes_) for bytes_ in moves))


def block_backward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """One decoder layer, backward: of each product two, and the elementwise kernels' own."""
    n, D, F, K = batch.tokens, model.dim, model.ffn_dim, model.n_kv_heads * model.head_dim
    forward = block_forward(model, batch)
    products = tuple(k for k in forward if k.work == "matmul" for _ in range(2))
    # Flash attention computes the scores again: five products where forward has two.
    attention = Kernel("attention", "attention", 2.5 * _attention_flops(model, batch))
    if batch.compiled:
        moves = [5 * n * D, 5 * n * D, 2 * n * (D + K), 5 * n * F]
    else:
        rotation = [times * n * width for width in (D, K) for times in (2, 2, 2, 3)]
        norms, sums = [4 * n * D] * 2, [3 * n * D] * 5
        moves = [*norms, *sums, *rotation, *[3 * n * F] * 3]
    return (*products, attention, *(Kernel("elementwise", "move", _moved(batch, m)) for m in moves))


def block_recompute(model: ModelSpec, batch: Batch, *, by_op: bool = False) -> tuple[Kernel, ...]:
    """What a checkpointed layer computes again: forward up to the last product, whose input is all that is needed.

    ``by_op``, attention and every second product are kept (see :class:`~refshard.plan.checkpointing.Checkpointing`).
    """
    needed = [kernel for kernel in block_forward(model, batch) if kernel.name != "down"]
    if not by_op:
        return tuple(needed)
    products = [kernel for kernel in needed if kernel.work == "matmul"]
    return tuple(k for k in needed if k.work == "move" or k in products[1::2])


def embedding_forward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """Looking up the tokens."""
    return (Kernel("embedding", "move", _moved(batch, 2 * batch.tokens * model.dim)),)


def embedding_backward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """A dense gradient: cleared, and the tokens' rows added."""
    cleared, added = model.vocab * model.dim, 3 * batch.tokens * model.dim
    return tuple(Kernel("embedding", "move", _moved(batch, moved)) for moved in (cleared, added))


def head_forward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """Final norm, head, and the loss in fp32."""
    n, D, V = batch.tokens, model.dim, model.vocab
    cast = [] if batch.dtype == "fp32" or batch.compiled else [(batch.element_bytes + 4) * n * V]
    softmax = [(batch.element_bytes if batch.compiled else 8) * n * V]
    moves = [_moved(batch, 2 * n * D), *cast, *softmax]
    return (_product("head", n, D, V), *(Kernel("loss", "move", moved) for moved in moves))


def head_backward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """The loss's gradient, the head's two products, and the final norm's gradient."""
    n, D, V = batch.tokens, model.dim, model.vocab
    e = batch.element_bytes
    if batch.compiled:
        moves = [2 * e * n * V]
    else:
        # The gradient of the chosen logits into zeros, softmax's, and back to the dtype of the logits.
        moves = [4 * n * V, 12 * n * V, *([] if batch.dtype == "fp32" else [(e + 4) * n * V])]
    products = (_product("head", n, D, V),) * 2
    return (*products, *(Kernel("loss", "move", moved) for moved in [*moves, _moved(batch, 4 * n * D)]))


def optimizer(parameters: int) -> tuple[Kernel, ...]:
    """Fused AdamW on as many fp32 parameters: four read, three written."""
    return (Kernel("optimizer", "move", 28.0 * parameters),)


def _product(name: str, m: int, k: int, n: int) -> Kernel:
    return Kernel(name, "matmul", 2.0 * m * k * n)


def _attention_flops(model: ModelSpec, batch: Batch) -> float:
    """Two products over the causal half."""
    return 2.0 * batch.sequences * batch.seq_len**2 * model.dim


def _moved(batch: Batch, elements: int) -> float:
    return float(batch.element_bytes * elements)
