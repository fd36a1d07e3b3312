"""Several forwards before one backward, several backwards, and how they nest."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Adapted,
    Block,
    Frozen,
    Language,
    Stack,
    adapted,
    frozen,
    mean_square,
    raises,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, Side


def _scores(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).log_softmax(-1)
    found: torch.Tensor = logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))
    return found


def _preference(side: Side, model: nn.Module, reference: nn.Module | None = None) -> None:
    def loss(step: int) -> torch.Tensor:
        chosen, rejected = side.tokens(step), side.tokens(100 + step)
        margin = _scores(model, chosen) - _scores(model, rejected)
        if reference is not None:
            with torch.no_grad():
                usual = _scores(reference, chosen) - _scores(reference, rejected)
            margin = margin - usual
        return -F.logsigmoid(0.3 * margin).mean()

    train(side, model, loss)


@case(table=True)
def preference_with_adapters(side: Side) -> None:
    """DPO over LoRA: two forwards of a model with frozen parameters, one backward."""
    _preference(side, side.shard(Language(blocks=[Adapted() for _ in range(3)]), side.tokens()))


@case()
def preference_of_all_parameters(side: Side) -> None:
    _preference(side, side.shard(Language(), side.tokens()))


@case()
def preference_with_a_reference_model(side: Side) -> None:
    reference = Language().requires_grad_(False)
    model = Language(blocks=[Adapted() for _ in range(3)])
    _preference(side, side.shard(model, side.tokens()), side.shard(reference, side.tokens()))


@case()
def preference_against_itself(side: Side) -> None:
    """The reference is the model without gradients."""
    model = side.shard(Language(blocks=[Adapted() for _ in range(3)]), side.tokens())
    _preference(side, model, model)


@case(table=True)
def siamese_over_frozen_blocks(side: Side) -> None:
    model = side.shard(frozen(), side.x())
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


@case(table=True)
def siamese(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


def _triplet(side: Side, model: nn.Module) -> None:
    def loss(step: int) -> torch.Tensor:
        anchor, near, far = (model(side.x(step + offset)) for offset in (0, 30, 60))
        return mean_square(anchor - near) - 0.1 * mean_square(anchor - far)

    train(side, model, loss)


@case()
def triplet(side: Side) -> None:
    _triplet(side, side.shard(Stack(), side.x()))


@case(table=True)
def triplet_with_adapters(side: Side) -> None:
    _triplet(side, side.shard(adapted(), side.x()))


@case()
def one_of_two_forwards_is_used(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        model(side.x(50 + step))
        return mean_square(model(side.x(step)))

    train(side, model, loss)


@case()
def first_of_two_forwards_is_used(side: Side) -> None:
    model = side.shard(adapted(), side.x())

    def loss(step: int) -> torch.Tensor:
        used = model(side.x(step))
        model(side.x(50 + step))
        return mean_square(used)

    train(side, model, loss)


@case()
def forward_of_its_own_output(side: Side) -> None:
    model = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x())
    train(side, model, lambda step: mean_square(model(model(side.x(step)))))


@case()
def adapters_over_their_own_output(side: Side) -> None:
    model = side.shard(Stack([Adapted() for _ in range(3)], head=nn.Linear(DIM, DIM)), side.x())
    train(side, model, lambda step: mean_square(model(model(side.x(step)))))


@case(table=True)
def number_of_forwards_varies(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        outs = [model(side.x(step + 20 * n)) for n in range(1 + step % 3)]
        return torch.stack([mean_square(out) for out in outs]).mean()

    train(side, model, loss, steps=6)


@case(table=True)
def two_forwards_from_the_third_step_on(side: Side) -> None:
    model = side.shard(adapted(), side.x())

    def loss(step: int) -> torch.Tensor:
        loss = mean_square(model(side.x(step)))
        return loss if step < 2 else loss + mean_square(model(side.x(50 + step)))

    train(side, model, loss, steps=5)


def _pipelined(side: Side, model: nn.Module, order: tuple[int, ...]) -> None:
    optimizer = sgd(model)
    for step in range(4):
        losses = [mean_square(model(side.x(step + 20 * n))) for n in range(len(order))]
        for n in order:
            losses[n].backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean(f"loss {step}", sum(losses))


@case()
def forwards_then_backwards_in_order(side: Side) -> None:
    _pipelined(side, side.shard(Stack(), side.x()), (0, 1))


@case()
def forwards_then_backwards_in_reverse(side: Side) -> None:
    _pipelined(side, side.shard(Stack(), side.x()), (1, 0))


@case()
def adapters_forwards_then_backwards(side: Side) -> None:
    _pipelined(side, side.shard(adapted(), side.x()), (0, 2, 1))


@case(table=True)
def discriminator_of_real_and_fake(side: Side) -> None:
    """A GAN: the generator trains through the discriminator, which trains on real and fake rows in one backward."""
    generator = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x())
    critic = side.shard(Stack(head=nn.Linear(DIM, 1)), side.x())
    optimizers = [sgd(generator), sgd(critic)]
    for step in range(4):
        real, noise = side.x(step), side.x(50 + step)
        fake = generator(noise)
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        side.log_mean(f"critic {step}", loss)
        loss = F.softplus(-critic(generator(noise))).mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        side.log_mean(f"generator {step}", loss)


@case(variants=EVALUATED, table=True)
def critic_frozen_while_the_generator_trains(side: Side) -> None:
    generator = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x())
    critic = side.shard(Stack(head=nn.Linear(DIM, 1)), side.x())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    for step in range(3):
        critic.requires_grad_(True)
        loss = critic(generator(side.x(step)).detach()).mean() - critic(side.x(50 + step)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        critic.requires_grad_(False)
        loss = -critic(generator(side.x(step))).mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        side.log_mean(f"loss {step}", loss)


@case(table=True)
def frozen_critic_of_two_outputs(side: Side) -> None:
    """A frozen sharded model judges the output of a trained one twice."""
    critic = side.shard(frozen().requires_grad_(False), side.x())
    model = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x())
    train(side, model, lambda step: mean_square(critic(model(side.x(step))) - critic(model(side.x(50 + step)))))


@case()
def distilled_from_a_teacher(side: Side) -> None:
    teacher = side.shard(Stack().requires_grad_(False), side.x())
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(side.x(step))
        return mean_square(model(side.x(step)) - target)

    train(side, model, loss)


@case()
def two_losses_two_backwards(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        out = model(side.x(step))
        first, second = mean_square(out), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", first)


@case()
def one_graph_two_backwards_with_adapters(side: Side) -> None:
    model = side.shard(adapted(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        loss = mean_square(model(side.x(step)))
        loss.backward(retain_graph=True)
        loss.backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case()
def two_heads_two_backwards(side: Side) -> None:
    """Each backward runs through one head and the shared trunk."""
    model = side.shard(Stack(head=nn.Identity()), side.x())
    heads = nn.Linear(DIM, 1).to(side.device), nn.Linear(DIM, 2).to(side.device)
    optimizer = sgd(model)
    for step in range(4):
        out = model(side.x(step))
        mean_square(heads[0](out)).backward(retain_graph=True)
        mean_square(heads[1](out)).backward()
        optimizer.step()
        optimizer.zero_grad()


@case()
def auxiliary_loss_on_a_middle_block(side: Side) -> None:
    class Auxiliary(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            taps = [self.inputs(x)]
            for layer in self.layers:
                taps.append(self.call(layer, taps[-1]))
            out: torch.Tensor = mean_square(self.head(taps[-1])) + 0.3 * mean_square(taps[1])
            return out

    model = side.shard(Auxiliary(), side.x())
    train(side, model, lambda step: model(side.x(step)))


@case(variants=EVALUATED)
def siamese_frozen_blocks_looped(side: Side) -> None:
    class Looped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inputs(x)
            for layer in [*self.layers, *self.layers]:
                x = layer(x)
            out: torch.Tensor = self.head(x)
            return out

    model = side.shard(Looped([Frozen() for _ in range(3)]), side.x())
    train(side, model, lambda step: mean_square(model(side.x(step)) - model(side.x(50 + step))))


def _looped_later(side: Side, blocks: list[nn.Module]) -> None:
    class Looped(Stack):
        loops = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inputs(x)
            for layer in [*self.layers] * self.loops:
                x = layer(x)
            out: torch.Tensor = self.head(x)
            return out

    model = side.shard(Looped(blocks), side.x())

    def loss(step: int) -> torch.Tensor:
        model.loops = 1 if step < 2 else 2
        return mean_square(model(side.x(step)))

    train(side, model, loss)


@case(variants=EVALUATED, table=True)
def adapters_looped_from_the_third_step_on(side: Side) -> None:
    _looped_later(side, [Adapted() for _ in range(3)])


@case(variants=EVALUATED, table=True)
def blocks_looped_from_the_third_step_on(side: Side) -> None:
    _looped_later(side, [Block() for _ in range(4)])


@case(variants=PLAIN)
def backward_twice_without_retaining(side: Side) -> None:
    """The second backward raises, as torch has it; the next step is right."""
    model = side.shard(Stack())
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        with raises(RuntimeError, "second time"):
            loss.backward()
        model.zero_grad()
        train(side, model, start=step, steps=1)


@case(variants=EVALUATED, refuses="gradients of gradients|create_graph")
def gradient_penalty(side: Side) -> None:
    """A WGAN's penalty takes the gradient of a gradient."""
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        x = side.x(step).requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mean_square(out) + gradient.square().sum(1).mean()

    train(side, model, loss)
