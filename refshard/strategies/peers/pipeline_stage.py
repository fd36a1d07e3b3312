"""One rank's stretch of a pipelined Llama, and the loop that steps it."""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from refshard.models.batch import Batch, Tokens
from refshard.models.llama import Llama, next_token_loss, rotary_tables
from refshard.strategies.base import Loop
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.world import World


class Stage(nn.Module):
    """What one rank computes; ``first`` takes token ids (B, T) int64, others hidden states (B, T, D)."""

    def __init__(self, model: Llama, blocks: list[int], world: World) -> None:
        super().__init__()
        self.spec, rank = model.spec, world.group.rank()
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.blocks = nn.ModuleList(model.model.layers[i] for i in blocks)
        last = rank == world.group.size() - 1
        self.head = nn.Sequential(model.model.norm, model.lm_head) if last else None

    def forward(self, given: Tensor) -> Tensor:
        """Hidden states (B, T, D); of the last stage logits (B, T, V)."""
        x_BTD = given if self.embed is None else self.embed(given)
        cos_T1Q, sin_T1Q = rotary_tables(self.spec, x_BTD.shape[1], x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_T1Q, sin_T1Q)
        out: Tensor = x_BTD if self.head is None else self.head(x_BTD)
        return out

    def boundaries(self, world: World) -> tuple[Tensor, Tensor]:
        """What a microbatch gives to this stage and what the stage makes of it, on the meta device: torch then need not
        run the model once to find out, nor ask the neighbours.
        """
        case = world.case
        tokens = (case.global_batch // case.microbatches, case.seq_len)
        training = case.workload == "training"
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(*tokens, self.spec.dim, device="meta", requires_grad=training)
        logits = torch.empty(*tokens, self.spec.vocab, device="meta", requires_grad=training)
        return ids if self.embed is not None else hidden, hidden if self.head is None else logits


@final
class _AgreedStage(PipelineStage):
    """A stage of a dry run, where a rank is alone: torch's stages vote whether all know their boundaries, and they do.

    What the neighbours vote cannot be received, so this stage takes their agreement for granted.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


@final
class PipelineLoop(Loop):
    """Steps the schedule, and this rank's optimizer."""

    def __init__(self, stage: Stage, world: World) -> None:
        self._group, ranks = world.group, world.group.size()
        self._first, self._last = stage.embed is not None, stage.head is not None
        self._source = ranks - 1
        self._optimizer = make_optimizer(stage, world.case)
        given, made = stage.boundaries(world)
        kind = _AgreedStage if world.case.fidelity == "dryrun" else PipelineStage
        pipelined = kind(
            stage, world.group.rank(), ranks, world.device, group=world.group, input_args=given, output_args=made
        )
        schedule = Schedule1F1B if world.case.microbatches >= ranks else ScheduleGPipe
        self._schedule = schedule(pipelined, world.case.microbatches, loss_fn=next_token_loss)

    def train(self, batch: Batch) -> Tensor:
        """See :meth:`Loop.train`."""
        loss = self._run(self._schedule.step, batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def infer(self, batch: Batch) -> Tensor:
        """See :meth:`Loop.infer`."""
        with torch.no_grad():
            return self._run(self._schedule.eval, batch)

    def _run(self, run: object, batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        assert callable(run)
        assert isinstance(batch, Tokens)
        inputs_BT, targets_BT = batch.inputs, batch.targets
        run(*[inputs_BT] * self._first, target=targets_BT if self._last else None, losses=losses)
        mean = torch.stack(losses).mean().detach() if self._last else inputs_BT.new_zeros((), dtype=torch.float32)
        dist.broadcast(mean, group_src=self._source, group=self._group)
        return mean
