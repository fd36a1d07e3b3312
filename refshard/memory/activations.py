"""What the calls of a Llama's layers allocate, keep for backward and let go, op by op.

The order of ops is that of ``models/llama.py`` as torch 2.13 runs it eagerly. Lifetimes are Python's in forward (a
local lives until its function returns) and autograd's in backward (what an op saved lives until its node has run; two
gradients of one tensor are added into a third). Numbers of a few bytes (losses, counts) are left out, and so are the
temporaries of the rotary tables, which come before anything else.
"""

from dataclasses import dataclass

from refshard.memory.tape import Changes, Tape
from refshard.memory.tensors import (
    Tensors,
    attention_backward,
    attention_forward,
    norm_backward,
    norm_forward,
    rotate_backward,
    rotate_forward,
)
from refshard.specs.layers import Recompute

PRODUCTS_KEPT_BY_OP = frozenset({"query product", "value", "gate", "down"})
KEPT_BY_OP = PRODUCTS_KEPT_BY_OP | {"mixed", "sums"}
"""What checkpointing by op keeps: outputs of every second matrix product, from the first on, and those of attention,
where it is one kernel.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One part of a model: what changes in its forward and in its backward."""

    forward: Changes
    backward: Changes


def embedding_call(t: Tensors) -> Call:
    """Token ids to hidden states, and the rotary tables.

    Where the head is tied to it, the head's gradient of the matrix has been waiting for this one, and their sum
    arrives.
    """
    tape, matrix = new_tape(t), t.model.vocab * t.model.dim * t.element
    for name, nbytes in (("x", t.hidden), ("cosines", t.table), ("sines", t.table)):
        tape.make(name, nbytes)
    forward = tape.cut()
    tape = new_tape(t)
    tape.category = "workspace"
    tape.adopt("gradient", t.hidden)
    tape.make("embedding", matrix)
    tape.drop("gradient")
    if t.model.tied:
        tape.adopt("head", matrix)
        tape.make("both", matrix)
        tape.drop("head", "embedding")
    tape.arrive("both" if t.model.tied else "embedding")
    return Call(forward, tape.cut())


def block_call(t: Tensors, *, recompute: Recompute = "nothing", first: bool = False) -> Call:
    """One block, whose input is there before forward, and the gradient of whose output before backward.

    What it does not keep beside its input is computed again at the start of its backward, up to what the last product
    saves. The backward of the ``first`` block is the last to read the rotary tables.
    """
    kept = frozenset[str]()
    if recompute == "some":
        kept = KEPT_BY_OP if t.fused_attention else PRODUCTS_KEPT_BY_OP
    tape = new_tape(t, keeps=recompute == "nothing", retained=kept)
    tape.adopt("x", t.hidden)
    _block_until_last_product(tape, t)
    tape.make("down", t.hidden)
    tape.drop("norm2.output", "gated")
    tape.make("output", t.hidden)
    tape.drop("down", "middle")
    if recompute == "nothing":
        tape.drop("x")
    forward = tape.cut()
    tables = ("cosines", "sines") if first else ()
    # A checkpoint holds on to what the block was given until the last of what is recomputed has been read.
    ends: tuple[str, ...] = ()
    if recompute != "nothing":
        tape = new_tape(t, present=kept)
        tape.adopt("x", t.hidden)
        _block_until_last_product(tape, t)
        tape.drop("norm2.output", "gated", "middle")
        ends = ("x", *tables)
    if "down" in kept:
        tape.adopt("down", t.hidden)
        ends = (*ends, "down")
    for table in tables:
        tape.adopt(table, t.table)
    tape.category = "workspace"
    tape.adopt("gradient", t.hidden)
    middle = _feed_forward_backward(tape, t, bool(ends))
    normed = _attention_backward(tape, t, last_rotation=first and not ends)
    norm_backward(tape, t, "norm1", "x", normed, beside=middle, recomputed=bool(ends), ends=ends)
    return Call(forward, tape.cut())


def head_call(t: Tensors) -> Call:
    """The final norm and the head. Between forward and backward lies :func:`loss_call`.

    The gradient of a head that is tied to the embedding does not arrive: it waits for the embedding's.
    """
    tape = new_tape(t)
    tape.adopt("x", t.hidden)
    norm_forward(tape, t, "norm", "x")
    tape.drop("x")
    tape.category = "workspace"
    tape.make("logits", t.logits)
    tape.save("norm.output")
    tape.drop("norm.output")
    forward = tape.cut()
    tape.adopt("gradient", t.logits)
    matrix = t.model.vocab * t.model.dim
    normed = _product_backward(tape, t, "head", "gradient", "norm.output", matrix, waits=t.model.tied)
    norm_backward(tape, t, "norm", "x", normed)
    return Call(forward, tape.cut())


def loss_call(t: Tensors, remembered: tuple[int, ...] = ()) -> Call:
    """The loss in fp32 of logits, which it is the last to read, and their gradient.

    Autocast, whose context ends with it, lets go of casts of so many bytes that it ``remembered`` and nobody saved.
    """
    tape, wide = new_tape(t), t.widens
    casts = [tape.adopt(f"cast {index}", nbytes) for index, nbytes in enumerate(remembered)]
    tape.category = "workspace"
    tape.adopt("logits", t.logits)
    if wide:
        tape.make("wide", t.wide_logits)
    tape.make("log-probabilities", t.wide_logits)
    tape.drop(*(("wide", "logits") if wide else ("logits",)), *casts)
    forward = tape.cut()
    tape.make("of log-probabilities", t.wide_logits)
    tape.make("of wide", t.wide_logits)
    tape.drop("of log-probabilities", "log-probabilities")
    if wide:
        tape.make("of logits", t.logits)
        tape.drop("of wide")
    return Call(forward, tape.cut())


def new_tape(
    t: Tensors, *, keeps: bool = True, retained: frozenset[str] = frozenset(), present: frozenset[str] = frozenset()
) -> Tape:
    """A tape that rounds as the device's allocator does; see :class:`~refshard.memory.tape.Tape`."""
    return Tape(keeps=keeps, granule=t.granule, retained=retained, present=present)


def _block_until_last_product(tape: Tape, t: Tensors) -> None:
    """A block's forward from ``x`` until its last product is about to run, whose input it saves."""
    normed = norm_forward(tape, t, "norm1", "x")
    for name, nbytes in (("query", t.hidden), ("key", t.grouped)):
        tape.make(f"{name} product", nbytes)
        tape.save(normed)
        rotate_forward(tape, name, f"{name} product", nbytes)
    tape.make("value", t.grouped)
    tape.save(normed)
    mixed = attention_forward(tape, t)
    tape.make("attention", t.hidden)
    tape.save(mixed)
    tape.drop(normed, "query", "key", "value", mixed)
    tape.make("middle", t.hidden)
    tape.drop("attention")
    normed = norm_forward(tape, t, "norm2", "middle")
    tape.make("gate", t.inner)
    tape.save(normed)
    tape.make("silu", t.inner)
    tape.save("gate")
    tape.drop("gate")
    tape.make("up", t.inner)
    tape.save(normed)
    tape.make("gated", t.inner)
    tape.save("silu", "up")
    tape.drop("silu", "up")
    tape.save("gated")


def _feed_forward_backward(tape: Tape, t: Tensors, recomputed: bool) -> str:
    """From the gradient of a block's output to that of what lies between its halves, whose name it returns."""
    matrix, inner = t.model.dim * t.model.ffn_dim, t.inner
    of_gated = _product_backward(tape, t, "down", None, "gated", matrix, given=inner)
    of_silu, of_up = tape.make("of silu", inner), tape.make("of up", inner)
    tape.drop(of_gated, "silu", "up")
    beside = _product_backward(tape, t, "up", of_up, "norm2.output", matrix)
    of_gate = tape.make("of gate", inner)
    tape.drop(of_silu, "gate")
    normed = _product_backward(tape, t, "gate", of_gate, "norm2.output", matrix, beside=beside)
    return norm_backward(tape, t, "norm2", "middle", normed, beside="gradient", recomputed=recomputed)


def _attention_backward(tape: Tape, t: Tensors, *, last_rotation: bool) -> str:
    """From the gradient of what lies between a block's halves to that of its normed input, whose name it returns."""
    dim, grouped_dim = t.model.dim, t.model.n_kv_heads * t.model.head_dim
    mixed = _product_backward(tape, t, "o", None, "mixed", dim * dim)
    query, key, value = attention_backward(tape, t, mixed)
    beside = _product_backward(tape, t, "v", value, "norm1.output", dim * grouped_dim)
    key = rotate_backward(tape, t, key, t.grouped, last=False)
    beside = _product_backward(tape, t, "k", key, "norm1.output", dim * grouped_dim, beside=beside)
    query = rotate_backward(tape, t, query, t.hidden, last=last_rotation)
    return _product_backward(tape, t, "q", query, "norm1.output", dim * dim, beside=beside)


def _product_backward(
    tape: Tape,
    t: Tensors,
    name: str,
    gradient: str | None,
    saved: str,
    matrix: int,
    *,
    given: int | None = None,
    beside: str | None = None,
    waits: bool = False,
) -> str:
    """Backward of a product with a weight of ``matrix`` elements: the weight's gradient and that of what was ``saved``.

    ``gradient`` is the output's, None where something else reads it later. ``given`` is the bytes of the input's (by
    default hidden states), to which ``beside`` is added. The weight's gradient arrives, unless it ``waits`` for more.
    Returns the name of the input's gradient.
    """
    weight = tape.make(f"{name} weight", matrix * t.element)
    result = tape.make(f"{name} input", t.hidden if given is None else given)
    tape.drop(saved, *(() if gradient is None else (gradient,)))
    if beside is not None:
        total = tape.make(f"{name} sum", t.hidden)
        tape.drop(beside, result)
        result = total
    if not waits:
        tape.arrive(weight)
    return result
