"""Parameters out of the ordinary: kinds, dtypes, shapes, devices, and what is done to them."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

import refshard
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import Block, Language, Stack, adamw, adapted, mean_square, next_token, sgd, train
from tests.distributed.cases.sides import DIM, VOCAB, Side


def _fill(module: Any) -> None:
    """Values that are the same wherever they are written; buffers by the module's own rule."""
    for parameter in module.parameters(recurse=False):
        values = torch.linspace(0.3, 0.9, parameter.numel()).sin().mul(0.7).view(parameter.shape)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(values)
    if hasattr(module, "reset_buffers"):
        module.reset_buffers()


def _on_meta(side: Side, make: Any, *sample: torch.Tensor) -> Any:
    with torch.device("meta"):
        model = make()
    return side.shard(model, *sample, initialise=_fill)


@case()
def meta_device(side: Side) -> None:
    train(side, _on_meta(side, Stack, side.x()))


@case()
def meta_device_tied(side: Side) -> None:
    model = _on_meta(side, lambda: Language(tied=True), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


class Rotary(nn.Module):
    """Turns pairs of channels by angles that a buffer holds."""

    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("angles", torch.empty(DIM), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the buffer anew."""
        self.angles.copy_(torch.arange(DIM, dtype=self.angles.dtype) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles.cos() + torch.tanh(self.linear(x)) * self.angles.sin()


@case(table=True)
def meta_device_with_buffers(side: Side) -> None:
    """The initialiser knows how to fill the buffers."""
    train(side, _on_meta(side, lambda: Stack([Rotary() for _ in range(2)]), side.x()))


@case(variants=PLAIN, table=True)
def meta_device_with_batch_norm(side: Side) -> None:
    """By the modules' own ``reset_parameters``, for modules whose random numbers do not matter."""

    def make() -> nn.Module:
        return Stack([nn.Sequential(nn.BatchNorm1d(DIM), nn.Tanh()) for _ in range(2)])

    with torch.device("meta"):
        model = make()

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm1d):
            module.reset_parameters()
        else:
            _fill(module)

    side.shard(model, initialise=initialise)
    same = side.put(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    train(side, model, lambda _: mean_square(model(same)))


@case(variants=PLAIN)
def meta_device_with_buffers_in_the_root(side: Side) -> None:
    class Rooted(Stack):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((DIM,), 0.5))

        def reset_buffers(self) -> None:
            """Fill the buffer anew."""
            self.scale.fill_(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    train(side, _on_meta(side, Rooted))


class Doubled(torch.Tensor):
    """A subclass with an operator of its own: matrix products count twice."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Twice the product; else as a plain tensor."""
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) * 2


@case(variants=EVALUATED, table=True, refuses="subclass|Doubled|type")
def tensor_subclass_parameters(side: Side) -> None:
    model = Stack([nn.Linear(DIM, DIM) for _ in range(3)])
    for layer in model.layers:
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(Doubled))
    train(side, side.shard(model, side.x()))


class Marked(nn.Parameter):
    """A subclass of Parameter, which libraries tell by its class."""


@case(variants=PLAIN, refuses="subclass|Marked|type")
def parameter_subclass(side: Side) -> None:
    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Marked(torch.randn(DIM, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.linear(x, self.weight)) * (2.0 if isinstance(self.weight, Marked) else 1.0)

    train(side, side.shard(Stack([Checking() for _ in range(2)])))


@case(variants=PLAIN, table=True)
def float8_parameters(side: Side) -> None:
    """Frozen weights in float8 that the block casts by itself, where other parameters have another dtype in compute."""

    class Eighth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM).to(torch.float8_e4m3fn), requires_grad=False)
            self.bias = nn.Parameter(torch.zeros(DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight.dtype is torch.float8_e4m3fn
            return x + torch.tanh(F.linear(x, self.weight.to(x.dtype), self.bias))

    precision = refshard.Precision(parameters=torch.float64)
    train(side, side.shard(Stack([Eighth() for _ in range(3)]), precision=precision))


@case(variants=PLAIN, table=True)
def frozen_parameters_of_dtypes_that_are_only_gathered(side: Side) -> None:
    """Masks, and integers that no library adds up; the whole of each is read too."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.mask = nn.Parameter(torch.rand(DIM, DIM) > 0.4, requires_grad=False)
            self.levels = nn.Parameter(torch.randint(-9, 9, (DIM,), dtype=torch.int16), requires_grad=False)
            self.codes = nn.Parameter(torch.randint(9, (DIM,)).to(torch.uint16), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.linear(x, self.linear.weight * self.mask, self.linear.bias)
            return x + torch.tanh(hidden * self.levels / 9 + self.codes.to(x.dtype) / 9)

    model = side.shard(Stack([Masked() for _ in range(3)]), precision=refshard.Precision(parameters=torch.float64))
    train(side, model)
    for name, value in model.state_dict().items():
        side.log(f"saved {name}", value)


@case(variants=PLAIN, refuses="float8_e4m3fn, which collectives cannot reduce")
def float8_parameters_trained(side: Side) -> None:
    model = Stack()
    model.layers[0].scale = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
    train(side, side.shard(model))


@case(variants=PLAIN)
def integer_parameters(side: Side) -> None:
    """Frozen quantised weights with a scale."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (DIM, DIM), dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.full((DIM,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(F.linear(x, self.weight.to(x.dtype)) * self.scale)

    train(side, side.shard(Stack([Quantised() for _ in range(3)])))


class Spectral(nn.Module):
    """A filter of complex weights on the spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=DIM)
        return total


@case()
def complex_parameters(side: Side) -> None:
    train(side, side.shard(Stack([Spectral() for _ in range(3)]), side.x()))


@case(variants=PLAIN, table=True)
def complex_parameters_clipped(side: Side) -> None:
    model = side.shard(Stack([Spectral() for _ in range(3)]))

    def clip(step: int) -> None:
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    train(side, model, before_step=clip)


@case(variants=PLAIN, table=True)
def complex_parameters_clipped_by_the_sides_own(side: Side) -> None:
    model = side.shard(Stack([Spectral() for _ in range(3)]))
    train(side, model, before_step=lambda step: side.log(f"norm {step}", side.own_clip(model, 0.05)))


class Scalars(nn.Module):
    """Parameters without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.nothing = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.gain) + self.shift + self.nothing.sum()


@case()
def scalar_and_empty_parameters(side: Side) -> None:
    train(side, side.shard(Stack([Scalars() for _ in range(3)]), side.x()))


@case()
def parameters_smaller_than_the_world(side: Side) -> None:
    """Of one element: all ranks but one have none of it."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.gain)

    model = side.shard(Stack([Tiny() for _ in range(3)]), side.x())

    def clip(step: int) -> None:
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    train(side, model, before_step=clip, optimizer=adamw(model.parameters()))


@case()
def parameters_that_are_not_contiguous(side: Side) -> None:
    model = Stack([nn.Linear(DIM, DIM) for _ in range(3)])
    for layer in model.layers:
        layer.weight = nn.Parameter(torch.randn(DIM, DIM).T)
    train(side, side.shard(model, side.x()))


@case(variants=EVALUATED)
def convolutions_with_channels_last(side: Side) -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + torch.tanh(self.conv(x[:, None, None, :].expand(-1, -1, 4, -1)).mean((1, 2)))
            return out

    train(side, side.shard(Stack([Image() for _ in range(2)]), side.x()))


class Mixed(nn.Module):
    """Layers in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, DIM)
        self.narrow = nn.Linear(DIM, DIM, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.wide(x) + self.narrow(x.float()).double())


@case(rtol=1e-5)
def dtypes_mixed_in_a_block(side: Side) -> None:
    train(side, side.shard(Stack([Mixed() for _ in range(3)]), side.x()))


@case()
def blocks_of_different_sizes(side: Side) -> None:
    class Sized(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
            return out

    train(side, side.shard(Stack([Sized(width) for width in (1, 13, 4)]), side.x()))


@case()
def some_parameters_frozen(side: Side) -> None:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name and "layers.1" not in name)
    train(side, side.shard(model, side.x()))


@case(table=True)
def parameters_frozen_after_sharding(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, steps=2)
    model.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(side, model, start=2, optimizer=optimizer)


@case(table=True)
def parameters_unfrozen_after_sharding(side: Side) -> None:
    """Fine-tuning from the head downwards."""
    model = Stack()
    model.layers.requires_grad_(False)
    side.shard(model, side.x())
    train(side, model, steps=2)
    model.layers.requires_grad_(True)
    train(side, model, start=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@case(variants=PLAIN, refuses="replaced|moved")
def model_cast_after_sharding(side: Side) -> None:
    model = side.shard(Stack())
    model.to(torch.float32)
    train(side, model, lambda step: mean_square(model(side.x(step).float()).double()))


@case(variants=PLAIN, refuses="parameter 'bias' is put into a Linear")
def parameter_replaced_after_sharding(side: Side) -> None:
    model = side.shard(Stack())
    model.head.bias = nn.Parameter(torch.zeros(3, device=side.device))
    train(side, model)


@case(variants=PLAIN, refuses="module 'head' is put into a Stack")
def module_replaced_after_sharding(side: Side) -> None:
    """A new head, which no engine knows of."""
    model = side.shard(Stack())
    train(side, model, steps=2)
    torch.manual_seed(3)
    model.head = nn.Linear(DIM, 3).to(side.device)
    train(side, model, start=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@case(variants=PLAIN, refuses="cat of .*this rank holds")
def block_replicated_by_torch_after_sharding(side: Side) -> None:
    """Where parameters are whole, its reductions find no gradients to reduce."""
    model = side.shard(Stack())
    if side.world_size > 1:
        model.layers[0] = nn.parallel.DistributedDataParallel(model.layers[0])
    train(side, model)


@case(variants=PLAIN, refuses="functional|replaced|moved|layers|head")
def functional_call(side: Side) -> None:
    model = side.shard(Stack())
    values = {name: p * 1.1 for name, p in model.named_parameters()}
    side.log_rows("out", torch.func.functional_call(model, values, (side.x(),)))


@case()
def parameter_list_in_a_block(side: Side) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(DIM, DIM) / 2 for _ in range(3))
            self.named = nn.ParameterDict({"bias": torch.zeros(DIM)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = x + torch.tanh(x @ weight)
            total: torch.Tensor = x + self.named["bias"]
            return total

    train(side, side.shard(Stack([Listed() for _ in range(3)]), side.x()))


@case(table=True)
def parameter_list_in_the_root(side: Side) -> None:
    """Also where it is named as a block, which is never called."""

    class Listed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.ParameterList([torch.ones(DIM)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.extra[0])

    for blocks in (None, ["extra", "layers"]):
        model = side.shard(Listed(), side.x(), blocks=blocks)
        train(side, model)


class Held(nn.Module):
    """Holds weights for the module around it, and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 0.5))
        self.shifts = nn.ParameterDict({"a": torch.zeros(DIM), "b": torch.ones(DIM)})


@case(table=True)
def weights_held_beside_the_blocks(side: Side) -> None:
    """By modules without a forward, in modules before and after the blocks."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.ModuleList([Held()])
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held: Any = self.held[0]
            out: torch.Tensor = self.linear(x * held.scale) + held.shifts["a"] * held.shifts["b"]
            return out

    model = Stack(head=Holding())
    model.inputs = Holding()  # type: ignore[assignment]
    train(side, side.shard(model, side.x(), blocks=["layers"]))


@case()
def tied_between_blocks(side: Side) -> None:
    model = Stack([nn.Linear(DIM, DIM) for _ in range(3)])
    model.layers[2].weight = model.layers[0].weight
    train(side, side.shard(model, side.x()))


@case()
def module_shared_by_blocks(side: Side) -> None:
    shared = nn.Linear(DIM, DIM)
    train(side, side.shard(Stack([nn.Sequential(nn.Linear(DIM, DIM), shared) for _ in range(3)]), side.x()))


@case(variants=PLAIN, refuses="copied|copy")
def model_copied_after_sharding(side: Side) -> None:
    import copy

    model = side.shard(Stack())
    copied = copy.deepcopy(model)
    train(side, model)
    side.log_rows("copy", copied(side.x()))


@case(variants=PLAIN)
def buffers_of_each_rank(side: Side) -> None:
    """A buffer that counts the calls."""

    class Counting(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            out: torch.Tensor = torch.tanh(self.linear(x)) / self.calls
            return out

    train(side, side.shard(Stack([Counting(), Counting()])))


@case(variants=PLAIN, table=True)
def buffers_that_differ_by_rank(side: Side) -> None:
    """Each rank has a seed of its own; all take the first rank's buffers, as they do its parameters."""

    class Noisy(nn.Module):
        noise: torch.Tensor
        mask: torch.Tensor
        shift: torch.Tensor
        phase: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.register_buffer("noise", torch.randn(DIM))
            self.register_buffer("mask", torch.rand(DIM, 1).T > 0.3)
            self.register_buffer("shift", torch.randint(9, (1, 1)).expand(3, DIM))
            self.register_buffer("phase", torch.randn((), dtype=torch.complex64).conj(), persistent=False)
            self.register_buffer("nothing", torch.empty(0, dtype=torch.bfloat16))
            self.register_buffer("absent", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = self.noise * self.mask * self.phase.real.double() + self.shift[0]
            out: torch.Tensor = x + torch.tanh(self.linear(x) * factor)
            return out

    torch.manual_seed(side.rank)
    train(side, side.shard(Stack([Noisy() for _ in range(2)]), side.x()))


@case(variants=PLAIN, refuses="buffers of other names, shapes or dtypes")
def buffers_of_other_shapes_by_rank(side: Side) -> None:
    model = Stack()
    model.layers[0].register_buffer("own", torch.zeros(1 + side.rank))
    side.shard(model)
    train(side, model)


@case(
    variants=PLAIN, refuses=r"parts .* sharded already \('layers.0.up', 'layers.0.down'\).*blocks=\['layers.0.up', 'lay"
)
def sharded_from_the_inside_out(side: Side) -> None:
    """Parts of a block are sharded first, then the whole."""
    model = Stack()
    for part in (model.layers[0].up, model.layers[0].down):
        side.shard(part)
    side.models.clear()
    train(side, side.shard(model))


@case(variants=PLAIN, table=True, refuses=r"sharded already .* and 1 more.*by one call: refshard.shard\(model\)$")
def blocks_sharded_first(side: Side) -> None:
    """FSDP2's idiom."""
    model = Stack()
    for layer in model.layers:
        side.shard(layer)
    side.models.clear()
    train(side, side.shard(model, blocks=[]))


@case(variants=PLAIN)
def only_a_part_is_sharded(side: Side) -> None:
    """The trunk is sharded, the head is replicated and without gradients."""
    torch.manual_seed(0)
    trunk, head = Stack(head=nn.Identity()), nn.Linear(DIM, 2).requires_grad_(False).to(side.device)
    side.shard(trunk)
    train(side, trunk, lambda step: mean_square(head(trunk(side.x(step)))))


@case(variants=PLAIN)
def block_without_parameters(side: Side) -> None:
    train(side, side.shard(Stack([nn.Tanh(), Block(), nn.Identity()])))


@case(variants=PLAIN)
def large_vocabulary_beside_small_blocks(side: Side) -> None:
    class Large(Language):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40 * VOCAB, DIM, padding_idx=0)

    model = side.shard(Large())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(variants=PLAIN, refuses="replaced or moved")
def functional_call_of_a_block(side: Side) -> None:
    model = side.shard(Stack())
    block = model.layers[0]
    values = {name: p * 1.1 for name, p in block.named_parameters()}
    side.log_rows("out", torch.func.functional_call(block, values, (side.x(),)))


class Headless(Language):
    """Its norm and its head are one unit, and the head runs only when it is told to."""

    heads = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) if self.heads else self.encode(tokens)


@case(variants=PLAIN, table=True)
def seen_after_a_dry_run_of_half_a_unit(side: Side) -> None:
    """What ``model.parameters()`` gives then is what an optimizer trains."""
    model = side.shard(Headless())
    model.heads = False
    model(side.tokens())
    optimizer = adamw(model.parameters())
    model.heads = True
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer)


@case(variants=PLAIN, table=True)
def seen_after_a_call_of_half_a_unit(side: Side) -> None:
    model = side.shard(Headless())
    model.norm(side.x())
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=adamw(model.parameters()))


@case(table=True)
def unfrozen_stage_by_stage(side: Side) -> None:
    """Fine-tuning from the head downwards: a block more takes part every second step."""
    model = Stack()
    model.inputs.requires_grad_(False)
    model.layers.requires_grad_(False)
    side.shard(model, side.x())
    for stage in range(4):
        if stage:
            model.layers[3 - stage].requires_grad_(True)
        train(side, model, start=2 * stage, steps=2, optimizer=sgd(model, momentum=0.5))


@case(table=True)
def frozen_block_by_block(side: Side) -> None:
    """Blocks are frozen for good from the bottom upwards (FreezeOut); the optimizer stays as it is."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model, momentum=0.5)
    for stage, part in enumerate([None, model.inputs, *model.layers]):
        if part is not None:
            part.requires_grad_(False)
        train(side, model, start=stage, steps=1, optimizer=optimizer, before_step=lambda _: side.log_gradients(model))


@case(table=True)
def adapters_and_base_trained_in_turn(side: Side) -> None:
    """``requires_grad`` of parts of each block, toggled between steps (``set_adapter``)."""
    model = side.shard(adapted(), side.x())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(4):
        for name, parameter in model.named_parameters():
            if ".base." in name or name.endswith((".a", ".b")):
                parameter.requires_grad_((".base." in name) == bool(step % 2))
        train(side, model, start=step, steps=1, optimizer=optimizer, before_step=lambda _: side.log_gradients(model))
