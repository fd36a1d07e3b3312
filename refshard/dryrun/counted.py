"""Operators and memory of a factory's module, which runs forward and backward once, on the meta device.

Operators are counted as torch dispatches them, and priced by the rules of a dry run (``work.py``, ``price.py``). A
block's backward consists of the autograd nodes that its forward made. Storages are followed from the operator that
makes them until they are freed; parameters and their gradients are counted separately.
"""

import bisect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from refshard.dryrun.price import COMPUTED_AS, COSTS, PER_KERNEL_S, move_bytes
from refshard.dryrun.recording import Flag
from refshard.dryrun.work import work_of
from refshard.engine.grouping import find_blocks
from refshard.errors import SpecError
from refshard.models.counted import Values, count_flops, with_values
from refshard.models.own import Arguments, OwnModel, build_own, line_of
from refshard.specs.counted import COUNTED, Block, CountedModel, Counts, Moment, Operator, Pass, alike
from refshard.specs.hardware import HardwareSpec

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
           torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
           torch.bool: "bool", torch.complex64: "complex64"}  # fmt: skip
_OVERWRITING = ("fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_")
_SELECTING = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss_backward")
"""Operators that do not read what they write, and that read but some rows of their first tensor, as the fake device
counts them (``fakecuda/csrc/launch.cpp``)."""
_NARROW = ("linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
           "conv_transpose1d", "conv_transpose2d", "scaled_dot_product_attention",
           "multi_head_attention_forward")  # fmt: skip
_WIDE = ("softmax", "log_softmax", "layer_norm", "group_norm", "mse_loss", "pow", "rsqrt",
         "binary_cross_entropy_with_logits", "exp", "log", "sum", "norm", "cumsum", "prod", "softplus")  # fmt: skip
"""Functions that autocast computes in bf16 and in fp32 (torch's ``aten/src/ATen/autocast_mode.h``)."""

_LEAF = 2**62
"""Nodes that accumulate gradients have numbers above all others."""


def count_model(name: str, seq_len: int, variants: Sequence[str], hardware: HardwareSpec) -> CountedModel:
    """Count the module of the factory ``name``, in each of these precisions (:class:`CountedModel`'s ``counts``), with
    the kernels of attention that torch takes on the hardware.

    Raises:
        SpecError: it cannot be made or run on the meta device, or has no blocks.
    """
    with redirect_stdout(sys.stderr):
        own = build_own(name, 0, torch.device("meta"))
    blocks = [*find_blocks(own.module, own.blocks).values()]
    if not blocks:
        raise SpecError(
            f"model: the module of '{name}' must have blocks, got no nn.ModuleList; name them as the factory's third "
            "result (docs/how-to/measure.md)"
        )
    try:
        flops = count_flops(own, seq_len, backward=True)
        with _cuda_kernels(cudnn=hardware.capability[:1] in ((9,), (10,))):
            counters = {v: [_Counter(own, blocks, seq_len, size, v) for size in COUNTED] for v in variants}
    except Exception as error:
        raise SpecError(
            f"model: to plan for the factory '{name}', its module must run on the meta device, got {line_of(error)}; "
            "dry-run it instead: refshard dryrun --model"
        ) from error
    counts = {variant: (first.counts(), second.counts()) for variant, (first, second) in counters.items()}
    if not all(alike(*pair) for pair in counts.values()):
        raise SpecError(
            f"model: the module of '{name}' must run the same operators for batches of {COUNTED[0]} and {COUNTED[1]} "
            "sequences, got others; dry-run it instead: refshard dryrun --model"
        )
    some = [pair[0] for pair in counters.values()]
    return CountedModel(
        name=name, n_layers=len(some[0].calls), params=sum(p.numel() for p in own.module.parameters()),
        largest=max(sum(p.numel() for p in block.parameters()) for block in blocks), embedding=some[0].first_used,
        head=some[0].outside - some[0].first_used, casts=max(one.cast for one in some), flops_per_token=flops,
        counts=counts,
    )  # fmt: skip


class _Dispatch(NamedTuple):
    """A call of torch's dispatcher: when, in which autograd node (-1: forward), what the device does, and what the host
    takes, on the machine of :data:`COSTS`.
    """

    now: int
    node: int
    operator: Operator | None
    host_s: float


def _pass(calls: Iterable[_Dispatch]) -> Pass:
    found = [*calls]
    operators = tuple(one.operator for one in found if one.operator is not None)
    return Pass(operators=operators, host=sum(one.host_s for one in found) / PER_KERNEL_S)


@final
class _Call:
    """A call of a block: when it began and ended, in operators, in autograd nodes and in bytes alive, ``given`` in."""

    def __init__(self, begin: int, node: int, alive: int, given: set[int]) -> None:
        self.begin, self.node, self.alive, self.given = begin, node, alive, given
        self.end = self.last_node = self.left = self.saved = 0


@final
class _Counter(TorchDispatchMode):
    """Runs the module once with so many sequences, and has what happened."""

    def __init__(self, own: OwnModel, blocks: Sequence[nn.Module], seq_len: int, sequences: int, variant: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.cast = 0
        self._open: _Call | None = None
        self._done: list[_Dispatch] = []
        self._now, self._node, self._ids, self._alive = 0, -1, dict[int, int](), 0
        self._functions, self._running = 0, 0
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._sizes: list[int] = []
        self._made: list[int] = []
        self._freed: dict[int, int] = {}
        self._run(own, blocks, seq_len, sequences, variant)

    def _run(self, own: OwnModel, blocks: Sequence[nn.Module], seq_len: int, sequences: int, variant: str) -> None:
        narrow, meta = variant == "bf16", torch.device("meta")
        dtype = torch.bfloat16 if narrow else torch.float32
        state: dict[str, Tensor] = {
            n: nn.Parameter(torch.empty_like(p, device=meta, dtype=dtype)) for n, p in own.module.named_parameters()
        }
        parameters = {one.untyped_storage()._cdata: one for one in state.values()}
        self._parameters = {cdata: one.numel() for cdata, one in parameters.items()}
        inside = {id(p) for block in blocks for p in block.parameters()}
        around = {n for n, p in own.module.named_parameters() if id(p) not in inside}
        self._around = {state[n].untyped_storage()._cdata for n in around}
        self.outside, self.first_used, self._used = sum(state[n].numel() for n in around), 0, set[int]()
        state |= {name: with_values(buffer) for name, buffer in own.module.named_buffers()}
        given = own.batch(0, sequences, seq_len, range(sequences), torch.device("cpu")).tensors
        batch = Arguments({n: _cast(with_values(t), dtype) if narrow else with_values(t) for n, t in given.items()},
                          own.factory)  # fmt: skip
        for tensor in batch.tensors.values():
            self._follow(tensor)
        module = cast(nn.Module, lambda **given: functional_call(own.module, state, (), given))
        computing = _Autocast(self) if variant.startswith("autocast") else nullcontext()
        hooks = [hook for block in blocks for hook in (
            block.register_forward_pre_hook(self._enter, with_kwargs=True), block.register_forward_hook(self._leave),
        )]  # fmt: skip
        try:
            saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved)
            with meta, Values(), self, torch.enable_grad():
                with computing, saving, self._functions_counted():
                    loss = batch.loss(module)
                if not self.calls:
                    raise ValueError("none of its blocks is called")
                self._forward_ends, self._node = self._now, _LEAF
                loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        self._gradients = {
            self._ids[cdata]: one.numel()
            for one in parameters.values()
            if one.grad is not None and (cdata := one.grad.untyped_storage()._cdata) in self._ids
        }
        self._refs.clear()

    @contextmanager
    def _functions_counted(self) -> Iterator[None]:
        """Count calls of Python functions, without those within torch's dispatch and within hooks of this file."""
        depth, ours = 0, (__file__, torch.utils._python_dispatch.__file__)

        def count(frame: Any, event: str, _: object) -> None:
            nonlocal depth
            if event in ("call", "return") and frame.f_code.co_filename in ours:
                depth += 1 if event == "call" else -1
            elif event == "call" and not depth:
                self._functions += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._node >= 0:
            raise NotImplementedError("its blocks are checkpointed already; leave that to --checkpointing")
        tensors = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.is_floating_point())
        given = {self._ids[cdata] for one in tensors if (cdata := one.untyped_storage()._cdata) in self._ids}
        node = torch._C._autograd._get_sequence_nr()
        self._open = _Call(self._now, node, self._alive, given)
        self.calls.append(self._open)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        assert self._open is not None
        self._open.end = self._now
        self._open.last_node = torch._C._autograd._get_sequence_nr()
        self._open = None

    def _save(self, tensor: Tensor) -> Tensor:
        if self._open is not None:
            self._open.saved = self._now
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._now, host_s = self._now + 1, COSTS.operator_s + COSTS.call_s * self._functions
        if self._node >= 0:
            node = torch._C._current_autograd_node()
            number = _LEAF if node is None else node._sequence_nr()
            host_s += COSTS.node_s * (number != self._running)
            self._running, self._node = number, number if number < _LEAF else self._node
        if self.calls and self._now == self.calls[-1].end + 1:
            self.calls[-1].left = self._alive  # by now its caller has let go of its input
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor) and one.is_meta]
        if self._node < 0 and not self.calls:
            for cdata in {one.untyped_storage()._cdata for one in given} & self._around - self._used:
                self._used.add(cdata)
                self.first_used += self._parameters[cdata]
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.is_meta]
        old = {one.untyped_storage()._cdata for one in given}
        new = [one for one in made if one.untyped_storage()._cdata not in old]
        for one in new:
            self._follow(one)
        launched = (new or func._schema.is_mutable) and "empty" not in func.__name__
        operator = _operator(func, args, kwargs or {}, given, new) if launched else None
        self._done.append(_Dispatch(self._now, self._node, operator, host_s + COSTS.launch_s * bool(launched)))
        self._functions = 0
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (cdata := storage._cdata) in self._ids or cdata in self._parameters:
            return
        number, size = len(self._sizes), storage.nbytes()
        self._ids[cdata], self._alive = number, self._alive + size
        self._sizes.append(size)
        self._made.append(self._now)

        def ends(_: object) -> None:
            if self._ids.get(cdata) == number:
                del self._ids[cdata]
                self._freed[number], self._alive = self._now + 1, self._alive - size

        self._refs[number] = weakref.ref(storage, ends)

    def forget(self, tensor: Tensor) -> None:
        """Leave out a weight that autocast has cast."""
        number = self._ids.pop(tensor.untyped_storage()._cdata)
        self.cast += tensor.numel()
        self._alive -= self._sizes[number]
        self._freed[number] = self._made[number]

    def _course(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """By operator: bytes alive with its results, bytes alive before it, elements of gradients that have come."""
        grown, shrunk, come = (np.zeros(self._now + 3) for _ in range(3))
        for number, (size, made) in enumerate(zip(self._sizes, self._made)):
            if number in self._gradients:
                come[made] += self._gradients[number]
                continue
            grown[made] += size
            if number in self._freed:
                shrunk[self._freed[number]] += size
        alive = np.cumsum(grown - shrunk)
        return alive, alive - grown, np.cumsum(come)

    def counts(self) -> Counts:
        """What was counted."""
        alive, before, come = self._course()
        calls, last = self.calls, self.calls[-1]
        ends = [*(call.alive for call in calls[1:]), last.left]
        forward = [one for one in self._done if one.node < 0]
        begins, by_call = [call.node for call in calls], [list[_Dispatch]() for _ in calls]
        later, earlier = list[_Dispatch](), list[_Dispatch]()
        for one in self._done[len(forward) :]:
            place = bisect.bisect_right(begins, one.node) - 1
            if place >= 0 and one.node < calls[place].last_node:
                by_call[place].append(one)
            else:
                (later if one.node >= last.last_node else earlier).append(one)

        def moments(found: Sequence[_Dispatch], base: float) -> tuple[tuple[Moment, ...], float]:
            first, end = (found[0].now, found[-1].now + 1) if found else (1, 1)
            got = come - come[first - 1]
            made = tuple(Moment(nbytes=float(alive[t] - base), gradients=float(got[t])) for t in range(first, end))
            return made, float(before[end] - base)

        ending = range(last.end, self._forward_ends + 1)
        shared = Counter(number for call in calls for number in call.given)
        given = sum(self._sizes[n] for call in calls for n in call.given if shared[n] == 1 or len(calls) == 1)
        outside = [one for one in forward if not any(call.begin < one.now <= call.end for call in calls)]
        return Counts(
            blocks=self._kinds(forward, by_call, [moments(found, base) for found, base in zip(by_call, ends)]),
            before=_pass([*(one for one in outside if one.now <= last.begin), *earlier]),
            after=_pass([*(one for one in outside if one.now > last.begin), *later]),
            kept=float(ends[-1] - calls[0].alive) / len(calls), given=given / len(calls), entered=float(calls[0].alive),
            ending=tuple(Moment(nbytes=float(alive[t] - ends[-1]), gradients=0.0) for t in ending),
            loss=moments(later, ends[-1])[0],
            passed=moments([one for one in earlier if one.node < calls[0].node], calls[0].alive)[0],
        )  # fmt: skip

    def _kinds(
        self, forward: Sequence[_Dispatch], by_call: Sequence[Sequence[_Dispatch]],
        moments: Sequence[tuple[tuple[Moment, ...], float]],
    ) -> tuple[Block, ...]:  # fmt: skip
        """Blocks by their operators. The last of a kind needs most: something of the loss may still be there."""
        kinds: dict[tuple[Any, ...], Block] = {}
        for call, found, (course, left) in zip(self.calls, by_call, moments):
            own = _pass(one for one in forward if call.begin < one.now <= call.end)
            again = _pass(one for one in forward if call.begin < one.now <= call.saved)
            back = _pass(found)
            kind = own.operators, back.operators
            number = kinds[kind].number + 1 if kind in kinds else 1
            kinds[kind] = Block(number=number, forward=own, again=again, backward=back, moments=course, left=left)
        return tuple(kinds.values())


@final
class _Autocast(TorchFunctionMode):
    """What autocast to bf16 does on a GPU; the meta device has none. It casts each weight once. ``on`` within one."""

    on = False

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter, self._weights = counter, dict[int, Tensor]()

    def __enter__(self) -> Any:
        _Autocast.on = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _Autocast.on = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", "")).strip("_")
        dtype = torch.bfloat16 if name in _NARROW else torch.float32 if name in _WIDE else None
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, partial(self._cast, dtype), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _cast(self, dtype: torch.dtype, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) or dtype != torch.bfloat16:
            return _cast(tensor, dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = made = tensor.to(dtype)
            self._counter.forget(made)
        return self._weights[id(tensor)]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _cuda_kernels(*, cudnn: bool) -> Iterator[None]:
    """The kernels that a GPU has, and the meta device has not, of attention and dropout."""
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Tensor]] = {
        "scaled_dot_product_attention": partial(_attention, cudnn), "dropout": _dropout,
        "nll_loss": _nll_loss,
    }  # fmt: skip
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradMeta")
        yield
    finally:
        library._destroy()


def _attention(
    cudnn: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that torch takes on an A100 or later (``sdp_utils.cpp``): ``cudnn``'s, flash, memory-efficient, or
    plain products.
    """
    aten, width, low = torch.ops.aten, query.shape[-1], query.dtype == torch.bfloat16
    same = query.dim() == 4 and key.shape[-1] == width == value.shape[-1]
    same = same and not (attn_mask is not None and attn_mask.requires_grad)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    found: tuple[Any, ...]
    if cudnn and same and low and width <= 256 and width % 8 == 0 and dropout_p * 16 % 1 == 0:
        found = aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale
        )  # fmt: skip
    elif same and low and attn_mask is None and width <= 256:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif same and width % (8 if low else 4) == 0 and key.shape[1] == query.shape[1]:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )  # fmt: skip
    else:
        found = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )  # fmt: skip
    return cast(Tensor, found[0])


def _nll_loss(
    given: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    """As part of the cross entropy, where :class:`_Autocast` does not see it."""
    wide = given.float() if _Autocast.on else given
    return cast(Tensor, torch.ops.aten.nll_loss_forward(wide, target, weight, reduction, ignore_index)[0])


def _dropout(given: Tensor, p: float, train: bool) -> Tensor:
    return cast(Tensor, torch.ops.aten.native_dropout(given, p, True)[0]) if train and p else given.view_as(given)


def _operator(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> Operator:
    """What it does, as the fake device would record it."""
    name, reads, writes = func._schema.name.removeprefix("aten::"), 0, sum(map(_touched, made))
    values = dict(zip((one.name for one in func._schema.arguments), args)) | kwargs
    flags = Flag.CAUSAL if values.get("is_causal") else Flag(0)
    for place, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        for one in tree_leaves(values.get(argument.name)):
            if not isinstance(one, Tensor) or not one.is_meta:
                continue
            writes += _touched(one) if written else 0
            overwritten = written and (name in _OVERWRITING or argument.is_out)
            reads += 0 if overwritten or (name in _SELECTING and place == 0) else _touched(one)
    reads += sum(map(_touched, made)) if name in _SELECTING else 0
    signature = " ".join(map(_signature, given)) + (" -> " + " ".join(map(_signature, made)) if made else "")
    work = work_of(func._schema.name, signature, flags)
    dtype, times = COMPUTED_AS.get(work.dtype, ("fp32", 1.0))
    if work.kind in ("product", "attention"):
        scores = work.scores
        more: dict[str, Any] = {} if scores is None else {
            "heads": 2 * scores.pairs / scores.length**2, "length": scores.length, "head_dim": scores.head_dim,
            "kernel": scores.kernel, "backward": scores.backward,
        }  # fmt: skip
        kind = "attention" if scores is not None else "product"
        return Operator(kind=kind, dtype=dtype, nbytes=float(reads + writes), flops=work.flops / times, **more)  # type: ignore[arg-type]
    if name in ("_to_copy", "clone"):
        name, signature = "copy_", f"{_signature(made[0])} {_signature(given[0])}" if given and made else signature
    strided = torch.Tag.pointwise in func.tags and not _lie_alike(given)
    return Operator(
        kind="move", dtype=dtype, nbytes=move_bytes(name, signature, reads, writes),
        strided=float(max((one.numel() for one in given), default=0)) if strided else 0.0,
    )  # fmt: skip


def _signature(tensor: Tensor) -> str:
    return f"{_DTYPES.get(tensor.dtype, str(tensor.dtype))}[{','.join(map(str, tensor.shape))}]"


def _touched(tensor: Tensor) -> int:
    """Bytes of its elements, a broadcast one counted once."""
    size = tensor.itemsize
    for length, stride in zip(tensor.shape, tensor.stride()):
        size *= length if stride or not length else 1
    return size


def _lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether their elements lie in memory alike, with no gaps."""
    large = [one for one in tensors if one.numel() > 1]
    return len({(one.shape, one.stride()) for one in large}) < 2 and all(map(_dense, large))


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(tensor.stride(), tensor.shape) if length > 1
    ):
        if stride != expected:
            return False
        expected *= length
    return True
