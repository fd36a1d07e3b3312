"""The ordinary training loop, which most strategies leave as it is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import final

import torch
from torch import nn

from refshard.models.data import Batch
from refshard.strategies.base import Loop
from refshard.strategies.optimizer import MakeWhole, make_optimizer, unsharded
from refshard.strategies.world import World

Context = Callable[[], AbstractContextManager[object]]
StepContext = Callable[[Batch], AbstractContextManager[object]]


@final
class PlainLoop(Loop):
    """Forward, backward, optimizer step.

    A step runs within ``stepping(batch)``, forward and backward; all its microbatches but the last within
    ``unsynced()``; every forward and its loss within ``computing()``. ``whole`` makes an
    optimizer that needs whole tensors; ``adapt`` is given the optimizer and returns the one to step.
    """

    def __init__(
        self, module: nn.Module, world: World, *, unsynced: Context = nullcontext, computing: Context = nullcontext,
        stepping: StepContext = nullcontext, whole: MakeWhole = unsharded,
        adapt: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda made: made,
    ) -> None:  # fmt: skip
        self._module, self._parts = module, world.case.job.microbatches
        self._unsynced, self._computing, self._stepping = unsynced, computing, stepping
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizing: Context = nullcontext
        if world.case.job.optimizer == "adamw-8bit" and (world.device.type == "cpu" or world.case.job.offload):
            # torchao compiles its step: for more than a minute on a CPU, and not at all under an operator mode.
            self._optimizing = partial(torch.compiler.set_stance, "force_eager")
        if world.case.job.workload == "training":
            self._optimizer = adapt(make_optimizer(module, world.case, whole))
        else:
            module.eval()

    def train(self, batch: Batch) -> torch.Tensor:
        """Microbatches are of one size: the mean of their means is the mean over the batch."""
        assert self._optimizer is not None
        with self._stepping(batch):
            losses = self._accumulate(batch)
        mean = torch.stack(losses).mean()
        with self._optimizing():
            self._optimizer.step()
        self._optimizer.zero_grad()
        return mean

    def infer(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), self._stepping(batch):
            return self._loss(batch)

    def _accumulate(self, batch: Batch) -> list[torch.Tensor]:
        # A function of its own, so that nothing of the last graph lives on while the optimizer steps.
        losses, parts = [], self._parts
        for index, part in enumerate(batch.split(parts)):
            with nullcontext() if index == parts - 1 else self._unsynced():
                loss = self._loss(part)
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach())
        return losses

    def _loss(self, batch: Batch) -> torch.Tensor:
        with self._computing():
            return batch.loss(self._module)


def autocast(world: World) -> Context:
    """The context of a forward over fp32 parameters, if nothing else casts them."""
    return partial(torch.autocast, world.device.type, world.computed) if world.mixed else nullcontext
