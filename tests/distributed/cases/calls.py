"""Which modules are called, how often, in which order, and by whom."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.cases.case import ALL, EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Block,
    Checkpointing,
    Language,
    Stack,
    adamw,
    adapted,
    mean_square,
    next_token,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, VOCAB, Side


@case(table=True)
def ordinary(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, optimizer=adamw(model.parameters()))


@case()
def ordinary_language_model(side: Side) -> None:
    model = side.shard(Language(), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case()
def tied_language_model(side: Side) -> None:
    model = side.shard(Language(tied=True), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(table=True)
def submodule_called_by_itself(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(model.layers[0](side.x(step))))


@case(table=True)
def forward_called_directly(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(model.forward(side.x(step))))


@case(table=True)
def another_method_called(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(model.encode(side.x(step))))


@case(table=True)
def block_outlives_its_model(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    layers = model.layers
    side.models.clear()
    del model
    train(side, layers, lambda step: mean_square(layers[1](layers[0](side.x(step)))))


@case()
def blocks_called_by_a_loop_outside(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        x = model.inputs(side.x(step))
        for layer in model.layers:
            x = layer(x)
        return mean_square(model.head(x))

    train(side, model, loss)


@case()
def root_and_submodule_in_turn(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square((model.layers[1] if step % 2 else model)(side.x(step))))


@case()
def generation_between_steps(side: Side) -> None:
    model = side.shard(Language(), side.tokens())
    for step in range(3):
        train(side, model, lambda step: next_token(model, side.tokens(step)), start=step, steps=1)
        tokens = side.tokens(100, length=2)
        with torch.no_grad():
            for _ in range(3):
                logits = model(tokens)
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        side.log_rows("logits", logits)
        side.log_rows("tokens", tokens)


@case(table=True)
def generation_by_parts_between_steps(side: Side) -> None:
    """Generation that calls what lies within the model, and never the model itself."""
    model = side.shard(Language(), side.tokens())
    for step in range(3):
        train(side, model, lambda step: next_token(model, side.tokens(step)), start=step, steps=1)
        with torch.no_grad():
            side.log_rows("logits", model.head(model.encode(side.tokens(100))))


class Reversed(Stack):
    """Runs its blocks from last to first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in reversed(self.layers):
            x = self.call(layer, x)
        out: torch.Tensor = self.head(x)
        return out


@case()
def blocks_in_reverse_order(side: Side) -> None:
    train(side, side.shard(Reversed(), side.x()))


class Ordered(Stack):
    """Runs its blocks in the given order."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for index in self.order:
            x = self.call(self.layers[index], x)
        out: torch.Tensor = self.head(x)
        return out


def _in_orders(side: Side, *orders: tuple[int, ...]) -> None:
    model = side.shard(Ordered(), side.x())

    def loss(step: int) -> torch.Tensor:
        model.order = orders[step % len(orders)]
        return mean_square(model(side.x(step)))

    train(side, model, loss, steps=6)


@case(table=True)
def blocks_looped(side: Side) -> None:
    _in_orders(side, (0, 1, 2, 0, 1, 2))


@case()
def one_block_looped(side: Side) -> None:
    _in_orders(side, (0, 1, 1, 1, 2))


@case(table=True)
def loops_that_vary(side: Side) -> None:
    _in_orders(side, (0, 1, 2), (0, 1, 1, 2), (0, 1, 1, 1, 2), (0, 2))


@case()
def order_that_varies(side: Side) -> None:
    _in_orders(side, (0, 1, 2), (2, 0, 1), (1, 0, 2))


@case()
def early_exit(side: Side) -> None:
    _in_orders(side, (0, 1, 2), (0, 1), (0,))


@case()
def stochastic_depth_equal_on_ranks(side: Side) -> None:
    _in_orders(side, (0, 1, 2), (0, 2), (1, 2), (0, 1, 2))


@case()
def no_block_runs_at_times(side: Side) -> None:
    _in_orders(side, (0, 1, 2), ())


@case()
def block_that_never_runs(side: Side) -> None:
    _in_orders(side, (0, 2))


@case()
def other_way_in_evaluation(side: Side) -> None:
    model = side.shard(Ordered(), side.x())
    for step in range(3):
        model.order = (0, 1, 2)
        train(side, model, start=step, steps=1)
        model.order = (2, 0)
        with torch.no_grad():
            side.log_rows("evaluation", model(side.x(9)))


@case()
def blocks_shared_in_the_list(side: Side) -> None:
    shared = Block()
    train(side, side.shard(Stack([shared, Block(), shared]), side.x()))


class Chunked(Language):
    """Computes its loss in chunks, each a call of the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encode(tokens[:, :-1])
        chunks = zip(x.chunk(3, 1), tokens[:, 1:].chunk(3, 1))
        losses = [F.cross_entropy(self.head(part).flatten(0, 1), to.flatten()) for part, to in chunks]
        return torch.stack(losses).mean()


@case(table=True)
def loss_in_chunks_within_the_model(side: Side) -> None:
    model = side.shard(Chunked(), side.tokens())
    train(side, model, lambda step: model(side.tokens(step)))


@case(table=True)
def loss_in_chunks_outside(side: Side) -> None:
    model = side.shard(Language(), side.tokens())

    def loss(step: int) -> torch.Tensor:
        tokens = side.tokens(step)
        x = model.encode(tokens[:, :-1])
        chunks = zip(x.chunk(3, 1), tokens[:, 1:].chunk(3, 1))
        return torch.stack(
            [F.cross_entropy(model.head(part).flatten(0, 1), to.flatten()) for part, to in chunks]
        ).mean()

    train(side, model, loss)


@case(variants=EVALUATED, table=True)
def loss_in_chunks_with_backward_each(side: Side) -> None:
    """Each chunk's backward runs at once and stops at the head's input (torchtitan's chunked loss)."""
    model = side.shard(Language(), side.tokens())

    def loss(step: int) -> torch.Tensor:
        tokens = side.tokens(step)
        x = model.encode(tokens[:, :-1])
        cut = x.detach().requires_grad_()
        for part, to in zip(cut.chunk(3, 1), tokens[:, 1:].chunk(3, 1)):
            (F.cross_entropy(model.head(part).flatten(0, 1), to.flatten()) / 3).backward()
        assert cut.grad is not None
        return (x * cut.grad).sum()

    optimizer = sgd(model)
    for step in range(4):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


class TiedByHand(Language):
    """Computes logits with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.encode(tokens), self.embed.weight)


@case(table=True, refuses="embed")
def embedding_weight_as_head_in_the_root(side: Side) -> None:
    model = side.shard(TiedByHand(), side.tokens())
    train(side, model, lambda step: next_token(model, side.tokens(step)))


class Projected(Stack):
    """Computes with the head's weight by hand, and never calls the head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.encode(x), self.head.weight, self.head.bias)


@case(refuses="head")
def head_weight_used_without_its_module(side: Side) -> None:
    train(side, side.shard(Projected(), side.x()))


class Rooted(Stack):
    """Has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encode(x * self.scale) * self.scale) + self.shift
        return out


@case()
def parameters_in_the_root(side: Side) -> None:
    train(side, side.shard(Rooted(), side.x()))


class Experts(nn.Module):
    """Sends all rows to one of its experts, which the step says."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 1)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.router(x).sigmoid() * self.experts[self.step % 3](x)
        return out


@case()
def experts_chosen_alike_on_all_ranks(side: Side) -> None:
    blocks = [Experts(), Experts()]
    model = side.shard(Stack(blocks), side.x(), blocks=["layers"])

    def loss(step: int) -> torch.Tensor:
        for block in blocks:
            block.step = step
        return mean_square(model(side.x(step)))

    train(side, model, loss, steps=5)


@case()
def only_the_encoder_is_trained_for_a_while(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(model.encode(side.x(step)) if step < 2 else model(side.x(step))))


class Cut(Stack):
    """Gives the first blocks no gradient."""

    how = "no_grad"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                x = self.layers[0](self.inputs(x))
        else:
            x = self.layers[0](self.inputs(x)).detach()
        for layer in list(self.layers)[1:]:
            x = self.call(layer, x)
        out: torch.Tensor = self.head(x)
        return out


@case()
def first_blocks_under_no_grad(side: Side) -> None:
    train(side, side.shard(Cut(), side.x()))


@case()
def detached_between_blocks(side: Side) -> None:
    model = Cut()
    model.how = "detach"
    train(side, side.shard(model, side.x()))


@case()
def block_method_beside_forward(side: Side) -> None:
    """A method of a block that computes with submodules' calls."""

    class Two(Block):
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x))  # type: ignore[no-any-return]

    model = side.shard(Stack([Two(), Two()]), side.x())
    train(side, model, lambda step: mean_square(model.head(model.layers[0].twice(side.x(step)))))


@case(refuses=r"layers|method|forward|whole|part")
def block_method_that_reads_its_parameters(side: Side) -> None:
    """A method other than forward that computes with the block's own parameters (register_fsdp_forward_method)."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight)

        def project(self, x: torch.Tensor) -> torch.Tensor:
            """Not forward."""
            return x @ self.weight.T

    model = side.shard(Stack([Other(), Other()]), side.x())
    train(side, model, lambda step: mean_square(model(side.x(step))) + mean_square(model.layers[0].project(side.x())))


@case(variants=EVALUATED)
def two_models_in_one_loss(side: Side) -> None:
    encoder, decoder = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x()), side.shard(Stack(), side.x())
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    train(side, encoder, lambda step: mean_square(decoder(encoder(side.x(step)))), optimizer=optimizer)


@case()
def two_models_in_turn(side: Side) -> None:
    models = [side.shard(Stack(), side.x()) for _ in range(2)]
    for step in range(4):
        train(side, models[step % 2], start=step, steps=1)


@case(variants=EVALUATED)
def sharded_model_within_a_bare_one(side: Side) -> None:
    """A trainer's wrapper calls the sharded model."""
    model = side.shard(Stack(), side.x())
    outer = nn.Sequential(model, nn.Tanh())
    train(side, model, lambda step: mean_square(outer(side.x(step))))


class Pooled(Language):
    """Bag of words ahead of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(VOCAB, DIM)  # type: ignore[assignment]


@case()
def embedding_bag(side: Side) -> None:
    model = side.shard(Pooled(), side.tokens())
    train(side, model, lambda step: mean_square(model(side.tokens(step))))


@case(variants=PLAIN)
def sequential_with_named_blocks(side: Side) -> None:
    model = side.shard(nn.Sequential(nn.Linear(DIM, DIM), Block(), Block(), nn.Linear(DIM, 2)), blocks=["1", "2"])
    train(side, model)


@case(variants=PLAIN)
def blocks_named_by_class(side: Side) -> None:
    model = side.shard(nn.Sequential(nn.Linear(DIM, DIM), Block(), Block(), nn.Linear(DIM, 2)), blocks=[Block])
    train(side, model)


@case(variants=PLAIN)
def every_module_is_a_block(side: Side) -> None:
    layers = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    train(side, side.shard(layers, blocks=["0", "1", "2", "3"]))


@case(variants=EVALUATED, table=True)
def single_layer(side: Side) -> None:
    train(side, side.shard(nn.Linear(DIM, 3), side.x()))


@case(variants=EVALUATED, table=True)
def model_without_lists(side: Side) -> None:
    same = side.put(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))  # whose mean each rank knows
    model = side.shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.BatchNorm1d(DIM), nn.Linear(DIM, 3)), same)
    train(side, model, lambda _: mean_square(model(same)))


@case(table=True)
def blocks_of_a_model_that_is_one_unit(side: Side) -> None:
    """Checkpointing recomputes parts of the only unit."""
    train(side, side.shard(Stack(), side.x(), blocks=()))


@case(variants=EVALUATED)
def model_of_one_unit_with_frozen_parts(side: Side) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), adapted(), nn.Linear(3, 3).requires_grad_(False))
    train(side, side.shard(model, side.x(), blocks=()))


@case()
def adapters_trained(side: Side) -> None:
    train(side, side.shard(adapted(), side.x()))


class Skipping(Checkpointing):
    """A U-Net: what the first half computes is added in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.call(self.layers[0], x)
        second = self.call(self.layers[1], first)
        third = self.call(self.layers[2], second)
        fourth = self.call(self.layers[3], third + second)
        out: torch.Tensor = self.head(fourth + first)
        return out


@case(variants=ALL)
def skip_connections(side: Side) -> None:
    train(side, side.shard(Skipping(), side.x()))
