"""The ordinary training loop, which most strategies leave as it is."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refshard.errors import UnsupportedError
from refshard.models.llama import next_token_loss
from refshard.specs.case import CaseSpec
from refshard.strategies.base import Loop
from refshard.strategies.world import World

Context = Callable[[], AbstractContextManager[object]]

EPSILON = 1e-3
"""AdamW's epsilon. With torch's 1e-8 its steps hardly depend on the scale of gradients: of twice the right ones, a sum
over two ranks in place of the mean, ten losses of llama-tiny differ by 4e-7; with this, by far more than loss parity
allows.
"""


@final
class PlainLoop(Loop):
    """Forward, backward, optimizer step.

    All microbatches but a step's last run within ``unsynced()``, forward and backward; every forward and its loss
    within ``computing()``.
    """

    def __init__(
        self, module: nn.Module, world: World, *, unsynced: Context = nullcontext, computing: Context = nullcontext
    ) -> None:
        self._module, self._parts = module, world.case.microbatches
        self._unsynced, self._computing = unsynced, computing
        self._optimizer: torch.optim.Optimizer | None = None
        # torchao compiles its step, on a CPU for more than a minute, and not at all beneath what watches operators.
        self._eager = world.case.optimizer == "adamw-8bit" and world.device.type == "cpu"
        if world.case.workload == "training":
            self._optimizer = make_optimizer(module.parameters(), world.case)
        else:
            module.eval()

    def train(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """See :meth:`Loop.train`. Microbatches are of one size: the mean of their means is the mean over the batch."""
        assert self._optimizer is not None
        losses, parts = [], self._parts
        for index, (inputs, targets) in enumerate(zip(inputs_BT.chunk(parts), targets_BT.chunk(parts))):
            with nullcontext() if index == parts - 1 else self._unsynced():
                loss = self._loss(inputs, targets)
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        with self._stepping():
            self._optimizer.step()
        self._optimizer.zero_grad()
        return mean

    def infer(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """See :meth:`Loop.infer`."""
        with torch.no_grad():
            return self._loss(inputs_BT, targets_BT)

    def _stepping(self) -> AbstractContextManager[object]:
        return torch.compiler.set_stance("force_eager") if self._eager else nullcontext()

    def _loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        with self._computing():
            return next_token_loss(self._module(inputs_BT), targets_BT)


def make_optimizer(parameters: Iterable[nn.Parameter], case: CaseSpec) -> torch.optim.Optimizer:
    """The case's optimizer over those of the parameters that are trained, in a group for each mesh that DTensors lie
    on: one fused step cannot take several.

    Raises:
        UnsupportedError: AdamW with 8-bit state cannot step these.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in trained:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    given = [{"params": group} for group in groups.values()]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(given, lr=case.learning_rate, eps=EPSILON, fused=True)
    if any(isinstance(p, DTensor) and p.dtype == torch.bfloat16 and p.numel() >= 4096 for p in trained):
        raise UnsupportedError(
            "torchao's AdamW8bit cannot take bf16 DTensors of 4,096 elements or more; it says: RuntimeError: expected "
            "dtype torch.bfloat16 for `end`, but got dtype torch.float32"
        )
    # Here, since the package comes with an extra.
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(given, lr=case.learning_rate, eps=EPSILON)
    return optimizer


def autocast(world: World) -> Context:
    """What a forward over fp32 parameters runs in where nothing else casts them."""
    return partial(torch.autocast, world.device.type, world.computed) if world.mixed else nullcontext
