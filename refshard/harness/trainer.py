"""One rank's model, optimizer and data, as a strategy makes them: what is measured, emulated and dry-run alike."""

import math
import time

import torch
import torch.distributed as dist

from refshard.engine.grouping import group_units
from refshard.errors import RefshardError
from refshard.harness.marks import mark_units
from refshard.models.activation import checkpoint_layers
from refshard.models.data import TokenSource, open_source, rank_batch
from refshard.models.llama import Llama, initialise
from refshard.specs.case import CaseSpec
from refshard.specs.model import ModelSpec
from refshard.strategies.base import Strategy
from refshard.strategies.table import ROWS
from refshard.strategies.world import World


class Trainer:
    """One rank's model, optimizer and data; ``timed_step`` computes on the next batch.

    ``trained`` is the number of elements that all ranks together train.
    """

    def __init__(
        self, case: CaseSpec, spec: ModelSpec, strategy: Strategy, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._case, self._device = case, device
        self.losses: list[float] = []
        self._source: TokenSource = open_source(case.data, spec.vocab, case.seed)
        self._world = World.of(case, group, device)
        self._model = build_model(case, spec, device)
        self.trained = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        self._units = tuple((group.name, group.modules) for group in group_units(self._model, None))
        self._loop = strategy.wrap(self._model, self._world)
        torch.manual_seed((case.seed << 16) + self._world.data_rank)  # ranks that share tokens drop the same

    @property
    def drops(self) -> bool:
        """Whether the case trains adapters, whose recipe has dropout."""
        return self._case.tuning != "full" and self._case.workload == "training"

    def begin_dropout(self) -> None:
        """From now on adapters drop what they are given, as their recipe says. Until now they did not: which elements
        are dropped depends on the rank, so that the losses of the proof could equal nobody's.
        """
        from refshard.models.adapters import switch_dropout

        switch_dropout(self._model, on=True)

    def mark_units(self) -> None:
        """From now on, have traces say which unit computes."""
        mark_units(self._units)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets of a step, int64 token ids (B, T), on its device."""
        inputs, targets = rank_batch(
            self._source,
            step=step,
            rank=self._world.data_rank,
            world_size=self._case.data_ranks,
            global_batch=self._case.global_batch,
            seq_len=self._case.seq_len,
        )
        return inputs.to(self._device), targets.to(self._device)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute one step and return its loss, scalar fp32, for which nothing has waited."""
        step = self._loop.train if self._case.workload == "training" else self._loop.infer
        return step(inputs, targets)

    def timed_step(self, *, aligned: bool) -> float:
        """Compute one step and return its synchronised wall time in seconds.

        ``aligned`` lets all ranks start together, outside of the time taken.
        """
        inputs, targets = self.batch(len(self.losses))
        if aligned:
            dist.barrier(self._world.group)
        self._synchronise()
        started = time.perf_counter()
        loss = self.step(inputs, targets)
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
        losses = [self.step(inputs, targets) for inputs, targets in batches]
        self._synchronise()
        elapsed = time.perf_counter() - started
        self.losses += [loss.item() for loss in losses]
        return elapsed / steps

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def build_model(case: CaseSpec, spec: ModelSpec, device: torch.device) -> Llama:
    """The bare model that a strategy is given: initialised on ``device``, adapted if the case says so, its layers
    checkpointed. Where :func:`is_deferred`, it is on the meta device, for the strategy to shard and then to fill.

    What is tuned by adapters is in the dtype that is computed with; else masters are fp32, whatever the precision.
    """
    with torch.device("meta"):
        model = Llama(spec)
    if not is_deferred(case):
        model.to_empty(device=device)
        initialise(model, case.seed)
    if case.tuning != "full":
        # Here, since these packages come with an extra, and take seconds to import.
        from refshard.models.adapters import adapt, switch_dropout

        if case.precision == "bf16":
            model.to(torch.bfloat16)
        if case.tuning == "qlora":
            from refshard.models.nf4 import quantise

            quantise(model)
        adapt(model, case.seed)
        switch_dropout(model, on=False)
    checkpoint_layers(model, case.checkpointing)
    return model


def is_deferred(case: CaseSpec) -> bool:
    """Whether the strategy of a case is given its model on the meta device, so that no rank ever holds all of it."""
    return case.tuning == "full" and ROWS[case.strategy].deferred
