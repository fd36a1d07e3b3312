"""Pipelines: torch's schedules over a rank's stages, the loop that steps them, and the messages that they send.

As a strategy of its own, all ranks form one pipeline, and nothing is sharded; FSDP2 and DDP compose with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from refshard.errors import UnsupportedError
from refshard.models.data import Batch, Tokens
from refshard.models.llama import Llama, next_token_loss
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import fill_stages
from refshard.strategies.loop import StepContext
from refshard.strategies.optimizer import MakeWhole, make_optimizer, unsharded
from refshard.strategies.stages import Stage, parameters_of_all, stages_of
from refshard.strategies.world import World


@final
class Pipeline(Strategy):
    """Layers divided as evenly as can be; the first rank has the embedding, the last the final norm and the head."""

    def wrap(self, model: Llama, world: World) -> Loop:
        self._model, self._world = model, world
        self._stages = stages_of(model, world)
        fill_stages(self._stages, model, world)
        return PipelineLoop(self._stages, self._stages, world, residual=torch.float32)

    def wrapped_units(self) -> tuple[str, ...]:
        """This rank's stages, named by the layers that they hold."""
        named = {module: name for name, module in self._model.named_modules()}
        ends = ((named[stage.layers[0]], named[stage.layers[-1]]) for stage in self._stages)
        return tuple(f"{first}-{last.rpartition('.')[2]}" for first, last in ends)

    def announced(self) -> tuple[CollectiveCount, ...]:
        return count_collectives(announce_messages(self._stages, self._world, torch.float32))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        own = {name: parameter.detach for stage in self._stages for name, parameter in stage.named_parameters()}
        yield from parameters_of_all(self._model, self._world, own)


Schedule = PipelineScheduleSingle | PipelineScheduleMulti
_MULTI: Mapping[str, type[_PipelineScheduleRuntime]] = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}


@final
class PipelineLoop(Loop):
    """Steps the schedule, and this rank's optimizer. ``wrapped`` are the strategy's wrappers of the ``stages``, which
    pass on hidden states of dtype ``residual``. Steps run within ``stepping(batch)``.
    """

    def __init__(
        self, stages: Sequence[Stage], wrapped: Sequence[nn.Module], world: World, *, residual: torch.dtype,
        whole: MakeWhole = unsharded, stepping: StepContext = nullcontext,
    ) -> None:  # fmt: skip
        assert world.pipeline is not None
        self._group, self._stepping = world.pipeline.get_group(), stepping
        self._first, self._last = stages[0].first, stages[-1].last
        self._source = world.case.job.pp_ranks - 1
        self._optimizer = None
        if world.case.job.workload == "training":
            self._optimizer = make_optimizer(nn.ModuleList(wrapped), world.case, whole)
        made = [_staged(*each, world, residual) for each in zip(stages, wrapped)]
        self.schedule = _schedule(made, world)

    def train(self, batch: Batch) -> Tensor:
        assert self._optimizer is not None
        with self._stepping(batch):
            loss = self._run(self.schedule.step, batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def infer(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self._stepping(batch):
            return self._run(self.schedule.eval, batch)

    def _run(self, run: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, Tokens)
        losses: list[Tensor] = []
        options = {} if run == self.schedule.eval else {"return_outputs": False}
        given, target = [batch.inputs] * self._first, batch.targets if self._last else None
        try:
            run(*given, target=target, losses=losses, **options)
        except RuntimeError as error:  # torch's stages wrap every error in one
            raise (error.__cause__ or error) from None
        mean = torch.stack(losses).mean().detach() if self._last else batch.inputs.new_zeros((), dtype=torch.float32)
        dist.broadcast(mean, group_src=self._source, group=self._group)
        return mean


def _staged(stage: Stage, wrapped: nn.Module, world: World, residual: torch.dtype) -> pipelining.PipelineStage:
    """A stage for torch's schedules, with the shapes of its inputs and outputs: torch then need not run the model once
    to find out, nor ask the neighbours.
    """
    assert world.pipeline is not None
    case, training = world.case, world.case.job.workload == "training"
    ids = torch.empty(world.case.job.microbatch, world.tokens, dtype=torch.int64, device="meta")
    hidden = torch.empty(hidden_shape(stage, world), dtype=residual, device="meta", requires_grad=training)
    logits = torch.empty(*ids.shape, stage.spec.vocab, dtype=residual, device="meta", requires_grad=training)
    kind = _AgreedStage if case.protocol.fidelity == "dryrun" else pipelining.PipelineStage
    return kind(
        wrapped, stage.index, case.job.pp_ranks * case.job.interleave, world.device, group=world.pipeline.get_group(),
        input_args=ids if stage.first else hidden, output_args=logits if stage.last else hidden,
    )  # fmt: skip


def hidden_shape(stage: Stage, world: World) -> tuple[int, int, int]:
    """Shape of the hidden states that one stage passes to the next."""
    tokens = world.tokens // (world.case.job.tp if world.case.job.sequence_parallel else 1)
    return world.case.job.microbatch, tokens, stage.spec.dim


def _schedule(stages: list[pipelining.PipelineStage], world: World) -> Schedule:
    """Torch's schedule of the case.

    With fewer microbatches than stages, which cannot fill a pipeline, 1F1B computes all forwards first (GPipe).

    Raises:
        UnsupportedError: torch's schedule refuses the number of microbatches.
    """
    case = world.case
    if case.job.schedule == "1f1b":
        single = pipelining.Schedule1F1B if case.job.microbatches >= case.job.pp_ranks else pipelining.ScheduleGPipe
        return single(stages[0], case.job.microbatches, loss_fn=next_token_loss)
    if case.job.microbatches % max(1, case.job.microbatches // case.job.pp_ranks):
        raise UnsupportedError(
            f"schedule '{case.job.schedule}' runs microbatches in rounds of one size, as many as fill a pipeline of "
            f"{case.job.pp_ranks} ranks, got {case.job.microbatches}; use a multiple of {case.job.pp_ranks}"
        )
    return _MULTI[case.job.schedule](stages, case.job.microbatches, loss_fn=next_token_loss)


@final
class _AgreedStage(pipelining.PipelineStage):
    """A stage of a dry run with one rank: torch's stages vote whether all know their boundaries, and all do. The
    neighbours' votes cannot be received, so this stage takes them for granted.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


def announce_messages(stages: Sequence[Stage], world: World, residual: torch.dtype) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of a step's messages to the neighbours, hidden states onward and their gradients back for each
    microbatch, and of the mean loss, which the last rank broadcasts. A single rank sends itself nothing.
    """
    case = world.case
    training = case.job.workload == "training"
    for stage in stages if case.job.pp_ranks > 1 else ():
        size = torch.Size(hidden_shape(stage, world)).numel() * residual.itemsize
        onward, back = not stage.last, not stage.first
        for _ in range(case.job.microbatches):
            yield from [("send", size)] * (onward + (training and back))
            yield from [("recv", size)] * (back + (training and onward))
    yield "broadcast", 4


def gathers_of(schedule: Schedule, stage: Stage, rank: int) -> int:
    """How often a schedule gathers a sharded stage of the pipeline rank ``rank`` in a step: once, unless the rank has
    more stages than it may keep gathered at a time.
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        return 1
    actions = schedule.pipeline_order_with_comms[rank]
    return sum(
        action.computation_type is _ComputationType.UNSHARD and action.stage_index == stage.index for action in actions
    )
