"""Parameters of tensor subclasses: quantised ones that are frozen, and masters that are gathered in float8."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

import refshard
from tests.distributed.cases.case import PLAIN, case
from tests.distributed.cases.models import (
    Stack,
    mean_square,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, Side

aten = torch.ops.aten


class Coded(nn.Parameter):
    """A frozen matrix as codes of a table that an attribute holds, as bitsandbytes' 4-bit weights are."""

    record: Any

    @classmethod
    def of(cls, value: torch.Tensor) -> "Coded":
        """The nearest codes."""
        table = torch.linspace(-1, 1, 17)
        made = torch.Tensor._make_subclass(cls, (value[..., None] - table).abs().argmin(-1).to(torch.uint8), False)
        made.record = SimpleNamespace(table=table, turned=False)
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The table goes along."""
        self.record.table = self.record.table.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def value(self) -> torch.Tensor:
        """What it stands for."""
        value: torch.Tensor = self.record.table[self.data.long()]
        return value.T if self.record.turned else value

    def turn(self) -> None:
        """Use another layout from now on."""
        self.data = self.data.T.contiguous()
        self.record.turned = True

    def full_tensor(self) -> torch.Tensor:
        """The codes."""
        return self.detach().as_subclass(torch.Tensor)


class _Wrapper(torch.Tensor):
    """A tensor that consists of others, which its class names."""

    within: tuple[str, ...]
    kept = frozenset({aten.detach.default, aten._to_copy.default, aten.view.default, aten.as_strided.default})
    """Operators that return another one of the class."""

    @staticmethod
    def __new__(cls: Any, *tensors: torch.Tensor, dtype: torch.dtype) -> Any:
        first = tensors[0]
        made = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=dtype, device=first.device
        )
        vars(made).update(zip(cls.within, tensors))
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """See ``__new__``."""

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return list(self.within), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> Any:
        return cls(*inner.values(), dtype=dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func in cls.kept, f"{func} of a {cls.__name__}"
        first, *others = (getattr(args[0], name) for name in cls.within)
        if func is aten._to_copy.default:
            others = [tensor.to(kwargs["device"]) for tensor in others]
        kwargs = {k: v for k, v in (kwargs or {}).items() if k == "device"}
        return cls(func(first, *args[1:], **kwargs), *others, dtype=args[0].dtype)

    def value(self) -> torch.Tensor:
        """What it stands for."""
        raise NotImplementedError

    def full_tensor(self) -> torch.Tensor:
        """The same."""
        return self.value()


class _Pair(_Wrapper):
    """Codes and a scale for each row."""

    within = ("codes", "scale")
    codes: torch.Tensor
    scale: torch.Tensor


class Rows(_Wrapper):
    """A frozen matrix in 8 bits: a tensor in a tensor, as torchao's are, and what is added to each row."""

    within = ("pair", "shift")
    pair: _Pair
    shift: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor) -> nn.Parameter:
        """Of this matrix."""
        shift = value.mean(1, keepdim=True)
        scale = (value - shift).abs().amax(1, keepdim=True) / 127
        pair = _Pair(((value - shift) / scale).round().to(torch.int8), scale.float(), dtype=value.dtype)
        return nn.Parameter(cls(pair, shift, dtype=value.dtype), requires_grad=False)

    def value(self) -> torch.Tensor:
        """What it stands for."""
        assert self.pair.scale.dtype is torch.float32, "it was cast"
        return self.pair.codes * self.pair.scale + self.shift


class Low(_Wrapper):
    """A matrix in float8 under one scale."""

    within = ("eighths", "scale")
    eighths: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor, mesh: Any = None) -> "Low":
        """Of this matrix, or of a part of one that the ranks of a mesh divide."""
        largest = value.abs().amax()
        if mesh is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        scale = 400 / largest.clamp(min=1e-12)
        low: Low = cls((value * scale).to(torch.float8_e4m3fn), scale, dtype=value.dtype)
        return low

    def value(self) -> torch.Tensor:
        """What it stands for."""
        return self.eighths.to(self.dtype) / self.scale


class Master(_Wrapper):
    """A matrix that is computed with in float8, and is gathered as that."""

    within = ("master",)
    master: torch.Tensor
    kept = _Wrapper.kept | {
        aten.clone.default, aten.copy_.default, aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor,
        aten.split.Tensor,
    }  # fmt: skip

    @classmethod
    def of(cls, value: torch.Tensor) -> nn.Parameter:
        """Of this matrix."""
        return nn.Parameter(cls(value, dtype=value.dtype))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.master, (args, kwargs or {}))
        result = func(*args, **kwargs)
        wraps = func in cls.kept
        return tree_map_only(torch.Tensor, lambda t: cls(t, dtype=t.dtype), result) if wraps else result

    def value(self) -> torch.Tensor:
        """What is computed with where nothing is gathered."""
        return Low.of(self.master).value()

    def full_tensor(self) -> torch.Tensor:
        """The master."""
        return self.master

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """What to gather of this rank's elements."""
        low = Low.of(self.master, mesh)
        return (low.eighths,), low.scale

    def fsdp_post_all_gather(self, outputs: Any, scale: torch.Tensor, dtype: torch.dtype, *, out: Any = None) -> Any:
        """The matrix of what was gathered."""
        if out is None:
            return Low(outputs[0], scale, dtype=dtype), outputs
        out.scale = scale
        return None


class NewerMaster(Master):
    """With a hook of the newer form."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:  # type: ignore[override]
        """What to gather of this rank's elements."""
        assert (size, stride) == ((2 * DIM, DIM), (DIM, 1)), "those of the whole"
        assert isinstance(module, Quantised)
        assert policy.param_dtype is torch.float64
        return super().fsdp_pre_all_gather(mesh)


class Divided(Master):
    """Gathered as it is, and divided by a number that the hook returns."""

    def value(self) -> torch.Tensor:
        return self.master / (1 + Low.of(self.master).scale)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """What to gather of this rank's elements."""
        return (self.master,), 1 + Low.of(self.master, mesh).scale


class Product(torch.autograd.Function):
    """A matrix product. It keeps codes behind autograd's back, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.kept = (None, weight) if isinstance(weight, Coded) else ()
        ctx.save_for_backward(x, None if ctx.kept else weight)
        product: torch.Tensor = x @ weight.value().T
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = gradients[0].T @ x if ctx.needs_input_grad[1] else None
        return gradients[0] @ (ctx.kept[1] if ctx.kept else weight).value(), of_weight


class Quantised(nn.Module):
    """A layer with such a matrix, and a trained low-rank addition. Two ranks can divide the matrix by rows, as FSDP2
    has to.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.weight = kind.of(torch.randn(2 * DIM, DIM) / 2)
        self.bias = nn.Parameter(torch.randn(2 * DIM) / 2)
        self.a, self.b = (nn.Parameter(torch.randn(shape) / 2) for shape in ((2, DIM), (2 * DIM, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x
        if isinstance(self.weight, Coded):
            if not self.training:
                self.weight.turn()
            elif self.weight.record.turned:
                given = x.detach()  # a layout for evaluations
        out: torch.Tensor = Product.apply(given, self.weight) + x @ self.a.T @ self.b.T + self.bias
        return x + torch.tanh(out).view(-1, 2, DIM).mean(1)


def quantised(kind: Any) -> Stack:
    """Three such layers."""
    return Stack([Quantised(kind) for _ in range(3)])


@case(table=True)
def adapters_on_codes(side: Side) -> None:
    train(side, side.shard(quantised(Coded), side.x()))


@case(table=True)
def adapters_on_quantised_rows(side: Side) -> None:
    precision = refshard.Precision(parameters=torch.float64)
    train(side, side.shard(quantised(Rows), side.x(), precision=precision))


@case(table=True)
def gathered_in_float8(side: Side) -> None:
    model = side.shard(quantised(Master), side.x())

    def clip(step: int) -> None:
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.3))

    train(side, model, before_step=clip)


@case()
def gathered_in_float8_by_the_newer_hook(side: Side) -> None:
    """Masters that are frozen, until they are trained."""
    model = quantised(NewerMaster)
    model.layers[1].weight.requires_grad_(False)
    side.shard(model, side.x(), precision=refshard.Precision(parameters=torch.float64))
    train(side, model, steps=2)
    model.layers[1].weight.requires_grad_(True)
    train(side, model, start=2, optimizer=sgd(model))


@case(variants=PLAIN)
def gathered_as_it_is_by_hooks(side: Side) -> None:
    train(side, side.shard(quantised(Divided)))


@case(variants=PLAIN)
def gathered_in_float8_where_a_rank_has_no_element(side: Side) -> None:
    class Scaled(Quantised):
        def __init__(self, kind: Any) -> None:
            super().__init__(kind)
            self.gain = kind.of(torch.randn(1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gain: torch.Tensor = Product.apply(x[:, :1], self.gain)
            return super().forward(x) + gain

    train(side, side.shard(Stack([Scaled(Master) for _ in range(3)])))


@case(variants=PLAIN)
def gathered_in_float8_over_replicas(side: Side) -> None:
    train(side, side.shard(quantised(Master), replicas=True))


@case(variants=PLAIN)
def gathered_in_float8_from_the_host(side: Side) -> None:
    train(side, side.shard(quantised(Master), offload=True))


@case(variants=PLAIN)
def gathered_in_float8_from_the_meta_device(side: Side) -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.1 * len(parameter))

    with torch.device("meta"):
        model = quantised(Master)
    train(side, side.shard(model, initialise=fill))


@case(variants=PLAIN)
def codes_that_an_evaluation_lays_out_anew(side: Side) -> None:
    """As bitsandbytes does on some CPUs, which then cannot train; here the model in training mode is the one to be."""
    model = side.shard(quantised(Coded))
    if side.engine:
        model.eval()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                side.log_rows("out", model(side.x()))
        model.train()
    else:
        for _ in range(2):
            side.log_rows("out", model(side.x()))
    train(side, model)


@case(variants=PLAIN)
def gathered_in_float8_first_in_inference_mode(side: Side) -> None:
    """Autograd saves the scale."""

    class Scaled(Quantised):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight: Any = self.weight
            return super().forward(x / (weight if isinstance(weight, Low) else Low.of(weight.master)).scale * 400)

    model = side.shard(Stack([Scaled(Master) for _ in range(3)]))
    for step in range(2):
        with torch.inference_mode():
            side.log_rows("out", model(side.x()))
        train(side, model, start=step, steps=1)


@case(variants=PLAIN)
def gathered_in_float8_stepped_whole(side: Side) -> None:
    model = side.shard(quantised(Master))
    matrices = [layer.weight for layer in model.layers]
    optimizer = side.whole_tensors(torch.optim.Adafactor, model, matrices, lr=0.01)
    train(side, model, optimizer=optimizer)


@case(variants=PLAIN)
def codes_read_before_a_gradient_of_the_output_comes(side: Side) -> None:
    """The loss is taken from within a block."""

    class Tapped(nn.Module):
        tap: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = Coded.of(torch.randn(DIM, DIM) / 2)
            self.bias = nn.Parameter(torch.randn(DIM) / 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.tap = Product.apply(torch.tanh(x), self.weight)
            return x + torch.tanh(self.tap + self.bias)

    model = side.shard(Stack([Tapped() for _ in range(3)]))

    def loss(step: int) -> torch.Tensor:
        model(side.x(step))
        first: torch.Tensor = model.layers[0].tap
        return first.square().mean()

    train(side, model, loss)


@case(variants=PLAIN)
def quantised_by_each_rank(side: Side) -> None:
    """The first rank's codes, and its table."""
    torch.manual_seed(side.rank)
    model = quantised(Coded)
    for layer in model.layers:
        layer.weight.record.table *= 1 + side.rank
    train(side, side.shard(model))


@case(variants=PLAIN, refuses="'layers.1.shift' was unfrozen after sharding, but it is packed data")
def quantised_parameter_unfrozen(side: Side) -> None:
    class Marked(nn.Parameter):
        """Frozen until it is not."""

    model = Stack()
    model.layers[1].shift = Marked(torch.zeros(DIM), requires_grad=False)
    side.shard(model)
    train(side, model, steps=1)
    model.layers[1].shift.requires_grad_()
    train(side, model, start=1)


@case()
def adapters_on_codes_in_modes_of_their_own(side: Side) -> None:
    policies = {"layers.0": refshard.Policy(mode="replicate"), "layers.1": refshard.Policy(mode="zero1")}
    model = side.shard(quantised(Coded), side.x(), policies=policies)
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch))).backward()
        side.log("norm", side.own_clip(model, 0.05))
        optimizer.step()
        optimizer.zero_grad()


@case()
def adapters_on_quantised_rows_in_modes_of_their_own(side: Side) -> None:
    policies = {
        "layers.0": refshard.Policy(mode="replicate"),
        "layers.1": refshard.Policy(mode="zero1", precision=refshard.Precision(parameters=torch.float64)),
    }
    train(side, side.shard(quantised(Rows), side.x(), policies=policies))


@case()
def gathered_in_float8_in_modes_of_their_own(side: Side) -> None:
    policies = {"layers.0": refshard.Policy(mode="replicate"), "layers.1": refshard.Policy(mode="zero1")}
    model = side.shard(quantised(Master), side.x(), policies=policies)

    def clip(step: int) -> None:
        side.log(f"norm {step}", side.own_clip(model, 0.3))

    train(side, model, optimizer=sgd(model, momentum=0.9), before_step=clip)


@case(variants=PLAIN)
def gathered_in_float8_with_the_best_kept(side: Side) -> None:
    """Best weights by a deep copy of the state dict, and back; one matrix frozen meanwhile."""
    model = side.shard(quantised(Master))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(side, model, optimizer=optimizer, steps=2)
    best = copy.deepcopy(model.state_dict())
    model.layers[0].weight.requires_grad_(False)
    train(side, model, optimizer=optimizer, start=2, steps=2)
    model.load_state_dict(best)
    model.layers[0].weight.requires_grad_(True)
    train(side, model, optimizer=optimizer, start=4, steps=2)


@case(variants=PLAIN)
def adapters_loaded_alone(side: Side) -> None:
    """Adapters are saved and loaded by name, without the quantised weights."""
    model = side.shard(quantised(Coded))
    train(side, model, steps=2)
    saved = {n: v.clone() for n, v in model.state_dict().items() if n.rpartition(".")[2] in ("a", "b", "bias")}
    train(side, model, start=2, steps=2)
    model.load_state_dict(saved, strict=False)
    train(side, model, start=4, steps=2)
