"""One rank's model, optimizer and data, as a strategy makes them: what is measured, emulated and dry-run alike."""

import math
import time
from typing import Any, cast

import torch
import torch.distributed as dist

from refshard.engine.grouping import find_blocks, group_units
from refshard.errors import RefshardError
from refshard.measure.marks import mark_units
from refshard.measure.subject import LlamaSubject, OwnSubject, Subject
from refshard.models.data import Batch
from refshard.specs.case import CaseSpec
from refshard.specs.model import ModelSpec
from refshard.strategies.base import Strategy
from refshard.strategies.world import World


class Trainer:
    """One rank's model, optimizer and data; ``timed_step`` computes on the next batch.

    ``spec`` is None if the case names a factory. ``trained`` is the number of elements that all ranks together train,
    ``blocks`` are the names of the model's blocks, ``flops_per_token`` its model FLOPs, None if they are not known.
    """

    def __init__(
        self, case: CaseSpec, spec: ModelSpec | None, strategy: Strategy, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._case, self._device = case, device
        self.losses: list[float] = []
        self._subject: Subject = OwnSubject(case, device) if spec is None else LlamaSubject(case, spec, device)
        model, named = self._subject.model, self._subject.blocks
        self.flops_per_token = self._subject.flops_per_token
        self.trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.blocks = tuple(find_blocks(model, named))
        self._units = tuple((group.name, group.modules) for group in group_units(model, named))
        self._world = World.of(case, group, device, self.blocks)
        self._loop = strategy.wrap(cast(Any, model), self._world)  # rows without the axis "own model" get a Llama
        torch.manual_seed((case.seed << 16) + self._world.data_rank)  # ranks that share tokens drop the same

    @property
    def held(self) -> int:
        """How many of the trained elements this rank holds; padding is none of them."""
        parameters = (p for p in self._subject.model.parameters() if p.requires_grad and not p.is_meta)
        return sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)

    @property
    def drops(self) -> bool:
        """Whether training drops anything, once :meth:`begin_dropout` is called."""
        return self._subject.drops and self._case.workload == "training"

    def begin_dropout(self) -> None:
        """Turn dropout on. Until now it was off: which elements are dropped depends on the rank, so that the losses of
        the proof could equal nobody's.
        """
        self._subject.begin_dropout()

    def mark_units(self) -> None:
        """From now on, have traces say which unit computes."""
        mark_units(self._units)

    def batch(self, step: int) -> Batch:
        """This rank's share of a step's batch, on its device."""
        return self._subject.batch(step, self._world.data_rank)

    def step(self, batch: Batch) -> torch.Tensor:
        """Compute one step and return its loss, scalar fp32, for which nothing has waited."""
        return self._loop.train(batch) if self._case.workload == "training" else self._loop.infer(batch)

    def timed_step(self, *, aligned: bool) -> float:
        """Compute one step and return its synchronised wall time in seconds.

        ``aligned`` lets all ranks start together, outside of the time taken.
        """
        batch = self.batch(len(self.losses))
        if aligned:
            dist.barrier(self._world.group)
        self._synchronise()
        started = time.perf_counter()
        loss = self.step(batch)
        self._synchronise()
        elapsed = time.perf_counter() - started
        self.losses.append(loss.item())
        if not math.isfinite(self.losses[-1]):
            raise RefshardError(f"the loss of step {len(self.losses) - 1} is {self.losses[-1]}; lower learning_rate")
        return elapsed

    def free_step_s(self, steps: int) -> float:
        """Compute ``steps`` steps as training does that rarely reads its loss, and return the mean wall time, s.

        Ranks start together, batches are there before, and nothing waits for the device until all steps are issued.
        """
        batches = [self.batch(len(self.losses) + step) for step in range(steps)]
        dist.barrier(self._world.group)
        self._synchronise()
        started = time.perf_counter()
        losses = [self.step(batch) for batch in batches]
        self._synchronise()
        elapsed = time.perf_counter() - started
        self.losses += [loss.item() for loss in losses]
        return elapsed / steps

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
