"""What a Llama computes, kernel by kernel: the floating-point operations and the bytes of each.

The lists follow ``models/llama.py`` as torch runs it, eager or compiled. A matrix product reads and writes memory too,
but products of this size are bound by arithmetic; everything else is bound by memory. Suffixes as there: n tokens, D
model width, F feed-forward width, K key-value width, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from refshard.costs import attention_seconds, first_touch_seconds, move_seconds, product_seconds
from refshard.specs.hardware import ELEMENT_BYTES, Dtype, HardwareSpec
from refshard.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of ``flops``, whose operands and result are of ``nbytes`` in all."""

    name: str
    flops: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of ``heads`` query heads, of all sequences together."""

    heads: int
    seq_len: int
    head_dim: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """An elementwise kernel that reads and writes ``nbytes`` and evaluates ``transcendentals`` exponentials.

    ``fresh`` bytes of what it writes are too many for an allocator to have kept, where the system provides them anew.
    """

    nbytes: float
    transcendentals: float = 0.0
    fresh: float = 0.0


Kernel = Product | Attention | Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank computes at once: ``sequences`` of ``seq_len`` tokens in ``dtype``, eager or compiled.

    ``fused_norms`` are torch's on CUDA, from 2.9 on; elsewhere, and in Hugging Face's models, a norm is many kernels.
    """

    sequences: int
    seq_len: int
    dtype: Dtype
    compiled: bool = False
    fused_norms: bool = True

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
    match kernel:
        case Product():
            return product_seconds(hardware, dtype, kernel.flops, kernel.nbytes)
        case Attention():
            return attention_seconds(
                hardware, dtype, heads=kernel.heads, seq_len=kernel.seq_len, head_dim=kernel.head_dim,
                backward=kernel.backward,
            )  # fmt: skip
        case Move():
            moved = move_seconds(hardware, kernel.nbytes, kernel.transcendentals)
            return moved + first_touch_seconds(hardware, kernel.fresh)


def block_forward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """One decoder layer, forward."""
    n, D, F, K = batch.tokens, model.dim, model.ffn_dim, model.n_kv_heads * model.head_dim
    products = (
        _product(batch, "q", n, D, D), _product(batch, "k", n, D, K), _product(batch, "v", n, D, K),
        _product(batch, "o", n, D, D), _product(batch, "gate", n, D, F), _product(batch, "up", n, D, F),
        _product(batch, "down", n, F, D),
    )  # fmt: skip
    if batch.compiled:
        # Each norm with the residual addition before it, the rotation at once, the gate's product at once.
        moves = [_moves(batch, 4 * n * D)] * 2 + [_moves(batch, 2 * n * (D + K)), _moves(batch, 3 * n * F, n * F)]
    else:
        rotation = [_moves(batch, times * n * width) for width in (D, K) for times in (2, 2, 3)]
        norms, sums = _norm_forward(batch, n * D) * 2, [_moves(batch, 3 * n * D)] * 2
        moves = [*norms, *rotation, *sums, _moves(batch, 2 * n * F, n * F), _moves(batch, 3 * n * F)]
    return (*products, _attention(model, batch, backward=False), *moves)


def block_backward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """One decoder layer, backward: of each product two, and the elementwise kernels' own."""
    n, D, F, K = batch.tokens, model.dim, model.ffn_dim, model.n_kv_heads * model.head_dim
    products = tuple(k for k in block_forward(model, batch) if isinstance(k, Product) for _ in range(2))
    if batch.compiled:
        moves = [_moves(batch, 5 * n * D)] * 2 + [_moves(batch, 2 * n * (D + K)), _moves(batch, 5 * n * F, n * F)]
    else:
        rotation = [_moves(batch, times * n * width) for width in (D, K) for times in (2, 2, 2, 3, 0)]
        norms, sums = _norm_backward(batch, n * D) * 2, [_moves(batch, 3 * n * D)] * 5
        gate = [_moves(batch, 3 * n * F, n * F), *[_moves(batch, 3 * n * F)] * 2]
        moves = [*norms, *sums, *rotation, *gate]
    return (*products, _attention(model, batch, backward=True), *moves)


def block_recompute(model: ModelSpec, batch: Batch, *, by_op: bool = False) -> tuple[Kernel, ...]:
    """What a checkpointed layer computes again: forward up to the last product, whose input is all that is needed.

    ``by_op``, attention and every second product are kept (see :class:`~refshard.plan.checkpointing.Checkpointing`).
    """
    forward = block_forward(model, batch)
    products = [k for k in forward if isinstance(k, Product) and k.name != "down"]
    others = [k for k in forward if not isinstance(k, Product)]
    if by_op:
        return (*products[1::2], *(k for k in others if isinstance(k, Move)))
    return (*products, *others)


def embedding_forward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """Looking up the tokens."""
    return (_moves(batch, 2 * batch.tokens * model.dim),)


def embedding_backward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """A dense gradient: cleared, and the tokens' rows added."""
    cleared = float(batch.element_bytes * model.vocab * model.dim)
    return (Move(cleared, fresh=cleared), _moves(batch, 3 * batch.tokens * model.dim))


def head_forward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """Final norm, head, and the loss in fp32."""
    n, D, V, e = batch.tokens, model.dim, model.vocab, batch.element_bytes
    loss = (
        [Move(e * n * V, n * V)]
        if batch.compiled
        else [*_casts(batch, n * V), Move(8 * n * V, 2 * n * V, fresh=4 * n * V)]
    )
    return (_product(batch, "head", n, D, V), *_norm_forward(batch, n * D), *loss)


def head_backward(model: ModelSpec, batch: Batch) -> tuple[Kernel, ...]:
    """The loss's gradient, the head's two products, and the final norm's gradient."""
    n, D, V, e = batch.tokens, model.dim, model.vocab, batch.element_bytes
    if batch.compiled:
        loss = [Move(2 * e * n * V, n * V)]
    else:
        # The gradient of the chosen logits into zeros, softmax's, and back to the dtype of the logits.
        loss = [Move(4 * n * V, fresh=4 * n * V), Move(12 * n * V, 1.5 * n * V), *_casts(batch, n * V)]
    return (*[_product(batch, "head", n, D, V)] * 2, *loss, *_norm_backward(batch, n * D))


def _product(batch: Batch, name: str, m: int, k: int, n: int) -> Product:
    return Product(name, 2.0 * m * k * n, float(batch.element_bytes * (m * k + k * n + m * n)))


def _attention(model: ModelSpec, batch: Batch, *, backward: bool) -> Attention:
    return Attention(batch.sequences * model.n_heads, batch.seq_len, model.head_dim, backward)


def _moves(batch: Batch, elements: int, transcendentals: float = 0.0) -> Move:
    """An elementwise kernel over so many elements of the batch's dtype, read and written."""
    return Move(float(batch.element_bytes * elements), transcendentals)


def _norm_forward(batch: Batch, elements: int) -> list[Move]:
    """One kernel; or, in fp32, square, mean, its root's inverse, and scaling, and then the gain."""
    if batch.fused_norms or batch.compiled:
        return [_moves(batch, 2 * elements)]
    inner = [Move(4.0 * numbers * elements) for numbers in (2, 1, 0, 0, 2)]
    return [*_casts(batch, elements), *inner, *_casts(batch, elements), _moves(batch, 2 * elements)]


def _norm_backward(batch: Batch, elements: int) -> list[Move]:
    """One kernel; or, in fp32, the gradients of the gain, its input, the scaling, the mean and the square, and sums."""
    if batch.fused_norms or batch.compiled:
        return [_moves(batch, 4 * elements)]
    inner = [Move(4.0 * numbers * elements) for numbers in (3, 3, 3, 1, 1, 1, 2, 2, 2, 2, 3, 0, 0, 0)]
    return [*_casts(batch, elements), *inner, *_casts(batch, elements)]


def _casts(batch: Batch, elements: int) -> list[Move]:
    """Logits to fp32, or their gradient back; none where they are fp32."""
    return [] if batch.dtype == "fp32" else [Move((batch.element_bytes + 4) * elements)]
