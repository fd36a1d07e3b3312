"""A small model that can be slowed down, trained on one rank's rows of each batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import refshard
from tests.distributed.cases.optimizers import Orthogonal
from tests.engine.fakes import Net, loss_of, make_batch
from tests.gpu.threads import Pause, no_pause

STEPS = 5
ROWS = 8


class _Pausing(torch.autograd.Function):
    """Passes a tensor on; takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause: Pause) -> torch.Tensor:
        ctx.pause = pause
        pause()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.pause()
        return gradient, None


class SlowBlock(nn.Module):
    """Pauses before it reads its weights, and in backward before it has their gradients."""

    def __init__(self, inner: nn.Module, pause: Pause) -> None:
        super().__init__()
        self.inner, self.pause = inner, pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pausing: Callable[[torch.Tensor, Pause], torch.Tensor] = _Pausing.apply
        return pausing(self.inner(pausing(x, self.pause)), self.pause)


def make_model(pause: Pause) -> Net:
    """The same weights for every rank. Six blocks, so that a ring's slots go round."""
    torch.manual_seed(0)
    model = Net(n_blocks=6)
    model.layers = nn.ModuleList(SlowBlock(layer, pause) for layer in model.layers)
    return model


def sgd(model: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def orthogonal(model: nn.Module) -> torch.optim.Optimizer:
    return Orthogonal(model.parameters())


def orthogonal_by_owners(model: nn.Module) -> torch.optim.Optimizer:
    return refshard.whole_tensors(Orthogonal, model)


def train(
    model: nn.Module,
    device: torch.device,
    rank: int,
    ranks: int,
    pause: Pause,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> None:
    """Train on this rank's rows; the host never waits for the device."""
    batches = [
        [t.to(device).chunk(ranks)[rank].contiguous() for t in make_batch(step, rows=ROWS)] for step in range(STEPS)
    ]
    optimizer = make(model)
    for inputs, targets in batches:
        loss_of(model, (inputs, targets)).backward()
        pause()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(device: torch.device, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """The reference: the whole batch, on one rank without the engine."""
    model = make_model(no_pause).to(device)
    train(model, device, 0, 1, no_pause, orthogonal if whole else sgd)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element; infinite where there is a NaN."""
    assert found.keys() == expected.keys()
    differences = [(found[name] - value).abs().max() for name, value in expected.items()]
    return max(float(d) if not d.isnan() else float("inf") for d in differences)
