"""transformers' ``Trainer`` on a model that transformers itself shards, by its ``DistributedConfig``.

``from_pretrained(..., distributed_config=...)`` makes a model, calls ``prepare_distribute_model`` and
``maybe_distribute_model`` on it, and then loads weights. Here the model is initialised, and adapted, already, so only
those two are called. Nothing of Accelerate shards, and ``Trainer`` keeps it from wrapping again, on a CPU as on a GPU.

``Trainer`` owns the training loop, so it runs on a stack of its own, a greenlet. That is no thread: profilers, dispatch
modes and process groups see one thread, and ``Trainer`` runs only within :meth:`_TrainerLoop.train`, from one batch
until it asks for the next.
"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from refshard.errors import UnsupportedError
from refshard.models.data import Batch, Tokens
from refshard.models.llama import Llama
from refshard.models.transformers_llama import llama_for_causal_lm
from refshard.records import CollectiveCount
from refshard.strategies.accelerate_fsdp2 import check_sharded, issued
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.fully_sharded import ROOT, PaddedUnit, full_dtensors, sharded_units
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.world import World


@final
class HFTrainer(Strategy):
    """Units by transformers' plan for Llama: each block, the embedding, final norm and head together.

    A tied head is the root's: transformers shards before it ties. So two units, with the final norm and the root, have
    the embedding, and each gathers and reduces it.
    """

    def wrap(self, model: Llama, world: World) -> Loop:
        """Shards over the default group.

        Raises:
            UnsupportedError: transformers would shard elsewhere, or not at all, or recompute something else.
        """
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and accelerator.type != world.device.type:
            raise UnsupportedError(f"transformers always shards on the {accelerator.type} device, got {world.device}")
        if world.shards == 1:
            raise UnsupportedError("transformers' DistributedConfig shards nothing over one rank")
        if world.case.job.checkpointing not in ("none", "full"):
            raise UnsupportedError(
                f"Trainer's checkpointing must be 'none' or 'full' here, got {world.case.job.checkpointing!r}"
            )
        config, _, meshes = LlamaForCausalLM.prepare_distribute_model(
            DistributedConfig(fsdp_size=world.shards, fsdp_mixed_precision=world.mixed)
        )
        theirs: Any = llama_for_causal_lm(model)
        if model.spec.tied:
            theirs.lm_head.weight = nn.Parameter(
                theirs.lm_head.weight.detach(), requires_grad=theirs.lm_head.weight.requires_grad
            )
        self._model = LlamaForCausalLM.maybe_distribute_model(theirs, config, meshes)
        self._model.tie_weights()
        loop = _TrainerLoop(self._model, world)
        check_sharded(loop.trainer.model_wrapped, loop.trainer.optimizer)
        self._world = world
        return loop

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self._units())

    def announced(self) -> tuple[CollectiveCount, ...]:
        """FSDP2's, and the norms of all gradients, one number each, reduced together, though none is clipped."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        norms = ("all_reduce", len(trained) * trained[0].itemsize)
        return count_collectives([*issued(self._units(), self._world), norms])

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from full_dtensors(self._model)

    def _units(self) -> list[PaddedUnit]:
        """The units, and the root if it has the head: a tied parameter is listed only once."""
        units = sharded_units(self._model, self._world)
        if fully_shard.state(self._model)._fsdp_param_group is not None:  # type: ignore[attr-defined]
            units.append(PaddedUnit(ROOT, units[0].parameters[:1]))
        return units


@final
class _TrainerLoop(Loop):
    """``Trainer.train()``, suspended whenever it waits for a batch."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._caller, case = getcurrent(), world.case
        with TemporaryDirectory() as folder:  # it wants one, and writes nothing
            arguments = TrainingArguments(
                output_dir=folder, max_steps=10**9, use_cpu=world.device.type == "cpu", seed=case.protocol.seed,
                per_device_train_batch_size=case.job.microbatch,
                gradient_accumulation_steps=case.job.microbatches, learning_rate=case.protocol.learning_rate,
                activation_checkpointing=case.job.checkpointing == "full", lr_scheduler_type="constant",
                max_grad_norm=0,
                average_tokens_across_devices=False,  # ranks have equally many
                report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True,
                remove_unused_columns=False,
            )  # fmt: skip
            self.trainer = _RankTrainer(model, arguments, self._batches(), world)
        self._running = greenlet(self.trainer.train)
        self._running.switch()  # until it asks for its first batch, with all prepared

    def train(self, batch: Batch) -> torch.Tensor:
        self.trainer.losses.clear()
        self._running.switch(batch)  # until it asks for the next batch, which is after the optimizer's step
        return torch.stack(self.trainer.losses).sum()  # each is divided by the tokens of all microbatches

    def infer(self, batch: Batch) -> torch.Tensor:
        raise UnsupportedError("transformers' Trainer has no forward-only step, so it cannot run inference")

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's own batches, in parts; ``shift_labels`` says that targets are next tokens already."""
        parts = self.trainer.args.gradient_accumulation_steps
        while True:
            batch: Tokens = self._caller.switch()
            for part in batch.split(parts):
                yield {"input_ids": part.inputs, "labels": part.targets, "shift_labels": part.targets}


class _RankTrainer(Trainer):
    """``Trainer`` with overrides that it documents: batches, optimizer, loss. ``losses`` are the microbatches'."""

    def __init__(
        self, model: nn.Module, arguments: TrainingArguments, batches: Iterator[dict[str, torch.Tensor]], world: World
    ) -> None:
        self._batches, self._world = batches, world
        self._modes: list[tuple[nn.Module, bool]] = []
        self.losses: list[torch.Tensor] = []
        super().__init__(model, arguments)

    def get_train_dataloader(self) -> Any:
        return self._batches  # as they are: Accelerate would shard or broadcast what is the rank's own

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        of: Any = model or self.model  # its own optimizer would spare norms the weight decay
        self.optimizer = self.optimizer or make_optimizer(of, self._world.case)
        return self.optimizer

    def training_step(self, model: nn.Module, *arguments: Any, **named: Any) -> torch.Tensor:
        # It calls ``model.train()``, but the harness decides whether adapters drop: compute_loss undoes that.
        self._modes = [(module, module.training) for module in model.modules()]
        loss: torch.Tensor = super().training_step(model, *arguments, **named)
        self.losses.append(loss)
        return loss

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        for module, mode in self._modes:
            module.training = mode
        return super().compute_loss(*arguments, **named)
