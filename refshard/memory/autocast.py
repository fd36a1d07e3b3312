"""What the calls of a Llama's layers allocate under ``torch.autocast``, which leaves parameters and hidden states fp32.

The order of ops is that of ``models/llama.py`` as torch 2.13 runs it on CUDA. A product casts its weight and what it is
given; norms, rotations and residual sums are in fp32, attention is not. Autocast remembers the casts of weights until
forward's context is left, in a checkpointed layer too. The gradient of a cast is cast back, and autograd adds it in
place to one that is there already. Lifetimes are otherwise those of :mod:`refshard.memory.activations`.
"""

from dataclasses import replace

from refshard.memory.activations import KEPT_BY_OP, Call, new_tape
from refshard.memory.tape import Tape
from refshard.memory.tensors import Tensors, attention_backward, attention_forward, norm_backward, norm_forward
from refshard.specs.layers import Recompute


def widened(t: Tensors) -> Tensors:
    """The same tensors in fp32: what autocast does not cast."""
    return replace(t, batch=replace(t.batch, dtype="fp32"))


def weight_casts(t: Tensors) -> tuple[int, ...]:
    """Bytes of the casts of one block's weights, which outlive the forward of a checkpointed one."""
    return tuple(t.element * numel for numel in _matrices(t).values())


def autocast_block_call(t: Tensors, *, recompute: Recompute = "nothing", first: bool = False) -> Call:
    """One block; see :func:`refshard.memory.activations.block_call`. Where it recomputes, the casts of its weights
    are not let go in its forward.
    """
    kept, wide = KEPT_BY_OP if recompute == "some" else frozenset[str](), widened(t)
    tape = new_tape(t, keeps=recompute == "nothing", retained=kept)
    tape.adopt("x", wide.hidden)
    _block_until_last_product(tape, t, remembers=recompute != "nothing")
    tape.make("down", t.hidden)
    tape.drop("norm2.output", "gated")
    tape.make("output", wide.hidden)
    tape.drop("down", "middle")
    if recompute == "nothing":
        tape.drop("x")
    forward = tape.cut()
    tables = ("cosines", "sines") if first else ()
    ends: tuple[str, ...] = ()
    if recompute != "nothing":
        tape = new_tape(t, present=kept)
        tape.adopt("x", wide.hidden)
        ends = ("x", *tables)
    if "down" in kept:
        tape.adopt("down", t.hidden)
        ends = (*ends, "down")
    for table in tables:
        tape.adopt(table, wide.table)
    tape.category = "workspace"
    tape.adopt("gradient", wide.hidden)
    tape.make("narrow gradient", t.hidden)
    if recompute != "nothing":
        tape.category = "activations"
        _block_until_last_product(tape, t)
        tape.drop("norm2.output", "gated", "middle")
        tape.category = "workspace"
    middle = _feed_forward_backward(tape, t, recomputed=bool(ends))
    normed = _attention_backward(tape, t, last_rotation=first and not ends)
    norm_backward(tape, wide, "norm1", "x", normed, recomputed=bool(ends), ends=ends)
    tape.drop(middle)
    return Call(forward, tape.cut())


def autocast_head_call(t: Tensors) -> Call:
    """The final norm and the head; see :func:`refshard.memory.activations.head_call`."""
    tape, wide = new_tape(t), widened(t)
    tape.adopt("x", wide.hidden)
    norm_forward(tape, wide, "norm", "x")
    tape.drop("x")
    matrix = t.model.vocab * t.model.dim
    _cast_for_product(tape, t, "head", matrix)
    tape.category = "workspace"
    tape.make("logits", t.logits)
    tape.drop("head given", "norm.output")
    forward = tape.cut()
    tape.adopt("gradient", t.logits)
    normed = _product_backward(tape, t, "head", matrix, "gradient", waits=t.model.tied)
    norm_backward(tape, wide, "norm", "x", normed)
    return Call(forward, tape.cut())


def _matrices(t: Tensors) -> dict[str, int]:
    """Elements of a block's weights by product."""
    dim, inner, grouped = t.model.dim, t.model.ffn_dim, t.model.n_kv_heads * t.model.head_dim
    return {
        "q": dim * dim, "k": dim * grouped, "v": dim * grouped, "o": dim * dim,
        "gate": dim * inner, "up": dim * inner, "down": dim * inner,
    }  # fmt: skip


def _cast_for_product(
    tape: Tape, t: Tensors, name: str, matrix: int, *, given: str | None = None, remembers: bool = False
) -> None:
    """A product casts its weight of ``matrix`` elements and hidden states, and saves both for its backward; or saves
    what it is ``given`` in the narrow dtype. Autocast ``remembers`` a weight's cast that the product does not save.
    """
    weight = tape.make(f"{name} cast", matrix * t.element)
    tape.save(weight)
    if not remembers:
        tape.drop(weight)
    if given is None:
        hidden = tape.make(f"{name} given", t.hidden)
        tape.save(hidden)
    else:
        tape.save(given)


def _hidden_product(tape: Tape, t: Tensors, name: str, output: str, nbytes: int, *, remembers: bool) -> None:
    """A product of hidden states, whose ``output`` has ``nbytes``."""
    _cast_for_product(tape, t, name, _matrices(t)[name], remembers=remembers)
    tape.make(output, nbytes)
    tape.drop(f"{name} given")


def _block_until_last_product(tape: Tape, t: Tensors, *, remembers: bool = False) -> None:
    """A block's forward from ``x`` until its last product is about to run, whose input it saves."""
    matrices, wide = _matrices(t), widened(t)
    normed = norm_forward(tape, wide, "norm1", "x")
    for name, own, nbytes in (("query", "q", t.hidden), ("key", "k", t.grouped)):
        _hidden_product(tape, t, own, f"{name} product", nbytes, remembers=remembers)
        _rotate_forward(tape, f"wide {name}", f"{name} product", nbytes)
    _hidden_product(tape, t, "v", "value", t.grouped, remembers=remembers)
    tape.make("key", t.grouped)
    tape.make("query", t.hidden)
    mixed = attention_forward(tape, t)
    tape.drop("query", "key")
    _cast_for_product(tape, t, "o", matrices["o"], given=mixed, remembers=remembers)
    tape.make("attention", t.hidden)
    tape.drop("wide query", "wide key", "value", mixed, normed)
    tape.make("middle", wide.hidden)
    tape.drop("attention")
    norm_forward(tape, wide, "norm2", "middle")
    _hidden_product(tape, t, "gate", "gate", t.inner, remembers=remembers)
    tape.make("silu", t.inner)
    tape.save("gate")
    tape.drop("gate")
    _hidden_product(tape, t, "up", "up", t.inner, remembers=remembers)
    tape.make("gated", t.inner)
    tape.save("silu", "up")
    tape.drop("silu", "up")
    _cast_for_product(tape, t, "down", matrices["down"], given="gated", remembers=remembers)


def _rotate_forward(tape: Tape, name: str, given: str, nbytes: int) -> None:
    """Rotation of queries or keys of ``nbytes`` by fp32 tables; the result is fp32 too."""
    swapped = tape.make("swapped", nbytes)
    product, cast = tape.make("product", 2 * nbytes), tape.make("wide swapped", 2 * nbytes)
    tape.make(name, 2 * nbytes)
    tape.drop(cast, product, given, swapped)


def _rotate_backward(tape: Tape, t: Tensors, gradient: str, nbytes: int, *, last: bool) -> str:
    """Backward of :func:`_rotate_forward` of the fp32 ``gradient``; ``last``, nobody needs the tables afterwards."""
    sines = tape.make("scaled sines", widened(t).table)
    product = tape.make("product", 2 * nbytes)
    tape.drop(sines, *(("sines",) if last else ()))
    swapped = tape.make("swapped", nbytes)
    tape.drop(product)
    tape.make("product", 2 * nbytes)
    result = tape.make("unrotated", nbytes)
    tape.drop("product", gradient, *(("cosines",) if last else ()))
    back = tape.make("back", nbytes)
    tape.drop(swapped, back)
    return result


def _feed_forward_backward(tape: Tape, t: Tensors, *, recomputed: bool) -> str:
    """From the gradient of a block's output, which is there in both dtypes, to that of what lies between its halves,
    whose name it returns.
    """
    matrices, inner = _matrices(t), t.inner
    of_gated = _product_backward(tape, t, "down", matrices["down"], "narrow gradient", given=("gated", inner))
    of_silu, of_up = tape.make("of silu", inner), tape.make("of up", inner)
    tape.drop(of_gated, "silu", "up")
    normed = _product_backward(tape, t, "up", matrices["up"], of_up)
    of_gate = tape.make("of gate", inner)
    tape.drop(of_silu, "gate")
    normed = _product_backward(tape, t, "gate", matrices["gate"], of_gate, beside=normed)
    middle = norm_backward(tape, widened(t), "norm2", "middle", normed, recomputed=recomputed)
    tape.drop("gradient")
    return middle


def _attention_backward(tape: Tape, t: Tensors, *, last_rotation: bool) -> str:
    """From the gradient of what lies between a block's halves to that of its normed input, whose name it returns."""
    matrices, wide = _matrices(t), widened(t)
    narrow = tape.make("narrow middle", t.hidden)
    mixed = _product_backward(tape, t, "o", matrices["o"], narrow, given=("mixed", t.hidden))
    of_query, of_key, value = attention_backward(tape, t, mixed)
    query = tape.make("wide of query", wide.hidden)
    tape.drop(of_query)
    key = tape.make("wide of key", wide.grouped)
    tape.drop(of_key)
    normed = _product_backward(tape, t, "v", matrices["v"], value)
    key = _rotate_backward(tape, t, key, t.grouped, last=False)
    normed = _product_backward(tape, t, "k", matrices["k"], key, beside=normed)
    query = _rotate_backward(tape, t, query, t.hidden, last=last_rotation)
    return _product_backward(tape, t, "q", matrices["q"], query, beside=normed)


def _product_backward(
    tape: Tape,
    t: Tensors,
    name: str,
    matrix: int,
    gradient: str,
    *,
    given: tuple[str, int] | None = None,
    beside: str | None = None,
    waits: bool = False,
) -> str:
    """Backward of a product with a weight of ``matrix`` elements: the weight's gradient, cast to fp32, and that of what
    it was given.

    ``given`` is the name and the bytes of the latter where the product did not cast it; else its gradient is cast to
    fp32, and ``beside`` is added to it in place. The weight's gradient arrives, unless it ``waits`` for more. Returns
    the name of the input's gradient.
    """
    weight = tape.make(f"{name} narrow weight", matrix * t.element)
    saved, nbytes = (f"{name} given", t.hidden) if given is None else given
    result = tape.make(f"{name} input", nbytes)
    tape.drop(gradient, f"{name} cast", saved)
    if given is None:
        narrow, result = result, tape.make(f"{name} wide input", widened(t).hidden)
        tape.drop(narrow)
        if beside is not None:
            tape.drop(beside)
    arriving = tape.make(f"{name} weight", widened(t).element * matrix)
    tape.drop(weight)
    if not waits:
        tape.arrive(arriving)
    return result
