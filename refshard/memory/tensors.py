"""The sizes of the tensors of one call of a Llama's layers, and what its norms, rotations and attention make of them.

Each function tells a tape what torch 2.13 does, op by op. On CUDA an RMSNorm is one kernel; elsewhere, and before torch
2.9, it is composed of ten ops, in fp32 whatever it is given. Attention is the flash kernel of either, which reads
grouped keys and values as they are; CUDA's backward makes fp32 sums of the queries' gradient, and keys' and values'
gradients for every query head, which it adds up (``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``).
cuDNN's kernel, which torch prefers on some GPUs, keeps the same for backward; what it takes for itself is not known
here. Without a fused kernel, torch multiplies and makes every score
(``aten/src/ATen/native/transformers/attention.cpp: _scaled_dot_product_attention_math``).
"""

from dataclasses import dataclass
from typing import Literal

from refshard.memory.tape import Tape
from refshard.specs.hardware import ELEMENT_BYTES, Dtype
from refshard.specs.model import ModelSpec, makes_scores

Device = Literal["cpu", "cuda"]
CUDA_GRANULE = 512
"""What CUDA's caching allocator rounds a size to (``c10/cuda/CUDACachingAllocator.cpp``: ``kMinBlockSize``)."""
FP32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank computes at once: ``sequences`` of ``seq_len`` tokens in ``dtype``."""

    sequences: int
    seq_len: int
    dtype: Dtype

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.sequences * self.seq_len

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Bytes of the tensors of one microbatch."""

    model: ModelSpec
    batch: Batch
    device: Device

    @property
    def element(self) -> int:
        """One element of an activation or of a parameter as it is computed with."""
        return self.batch.element_bytes

    @property
    def granule(self) -> int:
        """What the device's allocator rounds a size to."""
        return CUDA_GRANULE if self.device == "cuda" else 1

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.batch.tokens

    @property
    def ids(self) -> int:
        """Token ids."""
        return self.tokens * _INT64

    @property
    def row(self) -> int:
        """One fp32 number a token."""
        return self.tokens * FP32

    @property
    def hidden(self) -> int:
        """Hidden states, queries, attention's output."""
        return self.tokens * self.model.dim * self.element

    @property
    def wide_hidden(self) -> int:
        """Hidden states in fp32."""
        return self.tokens * self.model.dim * FP32

    @property
    def grouped(self) -> int:
        """Keys, or values."""
        return self.tokens * self.model.n_kv_heads * self.model.head_dim * self.element

    @property
    def inner(self) -> int:
        """What lies between the feed-forward's products."""
        return self.tokens * self.model.ffn_dim * self.element

    @property
    def logits(self) -> int:
        """Logits."""
        return self.tokens * self.model.vocab * self.element

    @property
    def wide_logits(self) -> int:
        """Logits in fp32."""
        return self.tokens * self.model.vocab * FP32

    @property
    def sums(self) -> int:
        """Attention's fp32 log-sum-exp of each row of scores."""
        return self.row * self.model.n_heads

    @property
    def fused_attention(self) -> bool:
        """Whether attention is one kernel, which makes no scores."""
        return not makes_scores(self.model, fp32=not self.widens, device=self.device)

    @property
    def mask(self) -> int:
        """A causal mask of one byte for each query and key."""
        return self.batch.seq_len**2

    @property
    def scores(self) -> int:
        """Attention's scores, in fp32."""
        return self.batch.sequences * self.model.n_heads * self.mask * FP32

    @property
    def table(self) -> int:
        """Rotary cosines, or sines."""
        return self.batch.seq_len * self.model.head_dim * self.element

    @property
    def widens(self) -> bool:
        """Whether fp32 is wider than what is computed in."""
        return self.element < FP32

    @property
    def fused_norm(self) -> bool:
        """Whether an RMSNorm is one kernel."""
        return self.device == "cuda"

    @property
    def widened_norm(self) -> bool:
        """Whether an RMSNorm makes an fp32 copy of what it is given."""
        return self.widens and not self.fused_norm


def norm_forward(tape: Tape, t: Tensors, name: str, given: str) -> str:
    """RMSNorm of ``given``, in variables that begin with ``name``; the name of its output."""
    source, rstd, scaled, output = given, f"{name}.rstd", f"{name}.scaled", f"{name}.output"
    if t.fused_norm:
        tape.make(output, t.hidden)
        tape.make(rstd, t.row)
        tape.save(source, rstd)
        tape.drop(rstd)
        return output
    if t.widened_norm:
        source = tape.make(f"{name}.wide", t.wide_hidden)
    squares, mean = tape.make("squares", t.wide_hidden), tape.make("mean", t.row)
    tape.make(rstd, t.row)
    tape.drop(squares, mean)
    tape.make(scaled, t.wide_hidden)
    tape.save(source, rstd, scaled)
    if t.widened_norm:
        weighted = tape.make("weighted", t.wide_hidden)
        tape.drop(source, scaled)
        tape.make(output, t.hidden)
        tape.drop(weighted, rstd)
    else:
        tape.make(output, t.hidden)
        tape.drop(scaled, rstd)
    return output


def norm_backward(
    tape: Tape,
    t: Tensors,
    name: str,
    given: str,
    gradient: str,
    *,
    beside: str | None = None,
    recomputed: bool = False,
    ends: tuple[str, ...] = (),
) -> str:
    """Backward of :func:`norm_forward` with the output's ``gradient``; the name of that of ``given``.

    ``beside`` is a gradient of ``given`` that came another way, which is added. What was ``recomputed`` goes as soon as
    the node has read it, before its gradients are summed over what was broadcast. ``ends`` go with ``given``.
    """
    if t.fused_norm:
        result = tape.make(f"{name}.gradient", t.hidden)
        weight = tape.make(f"{name}.weight", t.model.dim * t.element)
        tape.drop(gradient, given, f"{name}.rstd", *ends)
        result = _added(tape, t, name, result, beside)
        tape.arrive(weight)
        return result
    weight_of, hidden = f"{name}.weight", t.wide_hidden
    wide = t.widened_norm
    source = f"{name}.wide" if wide else given
    if wide:
        widened = tape.make("widened", hidden)
        tape.drop(gradient)
        gradient = widened
    tape.make("of scaled", hidden)
    product = tape.make("product", hidden)
    if recomputed:
        tape.drop(f"{name}.scaled")
    weight = tape.make("weight in fp32" if wide else weight_of, t.model.dim * FP32)
    tape.drop(product)
    if wide:
        tape.make(weight_of, t.model.dim * t.element)
        tape.drop(weight)
    tape.drop(gradient, *(() if recomputed else (f"{name}.scaled",)))
    tape.arrive(weight_of)
    result = _norm_input_gradient(tape, t, name, (source, *ends), None if wide else beside)
    if wide:
        narrow = tape.make("narrow", t.hidden)
        tape.drop(result)
        result = _added(tape, t, name, narrow, beside)
    return result


def _norm_input_gradient(tape: Tape, t: Tensors, name: str, ends: tuple[str, ...], beside: str | None) -> str:
    """The rest of a composed norm's backward: through the product with the reciprocal root, and through that root,
    with which ``ends`` go.
    """
    rstd, hidden = f"{name}.rstd", t.wide_hidden
    direct = tape.make("direct", hidden)
    product = tape.make("product", hidden)
    of_rstd = tape.make("of rstd", t.row)
    tape.drop(product, "of scaled")
    direct = _added(tape, t, f"{name} direct", direct, beside)
    cubed, halved = tape.make("cubed", t.row), tape.make("halved", t.row)
    of_mean = tape.make("of mean", t.row)
    tape.drop(cubed, halved, of_rstd, rstd)
    of_squares = tape.make("of squares", hidden)
    tape.drop(of_mean)
    power, doubled = tape.make("power", hidden), tape.make("doubled", hidden)
    through = tape.make("through root", hidden)
    tape.drop(of_squares, power, doubled, *ends)
    result = tape.make(f"{name}.gradient" if not t.widened_norm else "sum", hidden)
    tape.drop(direct, through)
    return result


def _added(tape: Tape, t: Tensors, name: str, gradient: str, beside: str | None) -> str:
    if beside is None:
        return gradient
    total = tape.make(f"{name}.sum", t.hidden)
    tape.drop(gradient, beside)
    return total


def rotate_forward(tape: Tape, name: str, given: str, nbytes: int) -> str:
    """Rotation of queries or keys of ``nbytes``; the name of the result. Only the tables are saved for backward."""
    swapped, product = tape.make("swapped", nbytes), tape.make("product", nbytes)
    tape.make(name, nbytes)
    tape.drop(given, swapped, product)
    return name


def rotate_backward(tape: Tape, t: Tensors, gradient: str, nbytes: int, *, last: bool) -> str:
    """Backward of :func:`rotate_forward`; ``last`` says that nobody needs the tables afterwards."""
    sines = tape.make("scaled sines", t.table)
    swapped = tape.make("swapped", nbytes)
    tape.drop(sines)
    if last:
        tape.drop("sines")
    product = tape.make("product", nbytes)
    tape.drop(gradient)
    if last:
        tape.drop("cosines")
    back = tape.make("back", nbytes)
    tape.drop(swapped)
    result = tape.make("unrotated", nbytes)
    tape.drop(product, back)
    return result


def attention_forward(tape: Tape, t: Tensors) -> str:
    """Attention of ``query``, ``key`` and ``value``; the name of its output, laid out as the next product reads it."""
    if not t.fused_attention:
        return _products_forward(tape, t)
    tape.make("mixed", t.hidden)
    sums = tape.make("sums", t.sums)
    tape.save("query", "key", "value", "mixed", sums)
    tape.drop(sums)
    return "mixed"


def attention_backward(tape: Tape, t: Tensors, gradient: str) -> tuple[str, str, str]:
    """Backward of :func:`attention_forward`; the names of the gradients of query, key and value."""
    if not t.fused_attention:
        return _products_backward(tape, t, gradient)
    of = tape.make("of query", t.hidden), tape.make("of key", t.grouped), tape.make("of value", t.grouped)
    inside = _flash_workspace(t) if t.device == "cuda" else ()
    for index, nbytes in enumerate(inside):
        tape.make(f"inside {index}", nbytes)
    tape.drop(*(f"inside {index}" for index in range(len(inside))))
    tape.drop(gradient, "mixed", "query", "key", "value", "sums")
    return of


def _flash_workspace(t: Tensors) -> tuple[int, ...]:
    """What the kernel's backward takes for itself: row sums and the queries' gradient in fp32, of sequences and heads
    that are rounded up, and where keys are grouped their gradients and those of values for each head.
    """
    model, rounded = t.model, -(-t.batch.seq_len // 128) * 128
    width = -(-model.head_dim // 32) * 32 if model.head_dim <= 128 else -(-model.head_dim // 64) * 64
    rows = t.batch.sequences * model.n_heads * rounded * FP32
    expanded = (t.hidden, t.hidden) if model.n_kv_heads < model.n_heads else ()
    return (rows, rows * width, *expanded)


def _products_forward(tape: Tape, t: Tensors) -> str:
    """Attention as products: scores, masked in place, and their softmax, which guards against rows that are masked."""
    tape.make("scaled query", t.hidden)
    tape.make("ones", t.mask)
    tape.make("causal", t.mask)
    tape.drop("ones")
    tape.make("mask", FP32 * t.mask)
    tape.drop("causal")
    for name in ("all keys", "all values", "scaled keys"):
        tape.make(name, t.hidden)
    queries = "scaled query"
    if t.batch.sequences > 1:  # a product takes one batch axis, in which sequences and heads lie end to end
        queries = tape.make("query rows", t.hidden)
    tape.make("scores", t.scores)
    tape.save(queries, "scaled keys")
    tape.drop("scaled keys", *(("query rows",) if queries == "query rows" else ()))
    tape.make("softmax", t.scores)
    tape.make("masked", t.scores // FP32)
    tape.make("masked rows", t.row * t.model.n_heads // FP32)
    tape.make("weights", t.scores)
    tape.save("weights")
    tape.drop("softmax", "masked", "masked rows", "scores")
    tape.make("heads", t.hidden)
    tape.save("weights", "all values")
    tape.drop("scaled query", "mask", "all keys", "all values", "weights")
    tape.make("mixed", t.hidden)
    tape.drop("heads")
    return "mixed"


def _products_backward(tape: Tape, t: Tensors, gradient: str) -> tuple[str, str, str]:
    """Backward of :func:`_products_forward`. Copies of a gradient in another layout are left out, once the scores are
    gone.
    """
    queries = "scaled query"
    if t.batch.sequences > 1:
        queries = "query rows"
        rows = tape.make("gradient rows", t.hidden)
        tape.drop(gradient)
        gradient = rows
    tape.make("of all values", t.hidden)
    tape.make("of weights", t.scores)
    tape.drop(gradient, "weights", "all values")
    tape.make("of scores", t.scores)
    tape.make("product", t.scores)
    tape.drop("product", "of weights", "weights")
    tape.make("of scaled keys", t.hidden)
    tape.make("of scaled query", t.hidden)
    tape.drop("of scores", queries, "scaled keys")
    tape.make("of all keys", t.hidden)
    tape.drop("of scaled keys")
    for name, nbytes, given in (("value", t.grouped, "all values"), ("key", t.grouped, "all keys")):
        tape.make(f"of {name}", nbytes)
        tape.drop(f"of {given}")
    tape.make("of query", t.hidden)
    tape.drop("of scaled query")
    return "of query", "of key", "of value"
