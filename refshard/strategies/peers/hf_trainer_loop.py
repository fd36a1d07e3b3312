"""transformers' ``Trainer`` stepped from outside: it owns the training loop, so it runs on a stack of its own.

A greenlet is no thread: profilers, dispatch modes and process groups see one thread, and ``Trainer`` runs only within
:meth:`HFTrainerLoop.train`, from a batch on until it asks for the next.
"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import nn
from transformers import Trainer, TrainingArguments

from refshard.errors import UnsupportedError
from refshard.models.batch import Batch, Tokens
from refshard.strategies.base import Loop
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.world import World

ENDLESS = 10**9
"""Steps that ``Trainer`` is told to take: how many there will be, it is not told."""


@final
class HFTrainerLoop(Loop):
    """``Trainer.train()``, suspended wherever it waits for a batch."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._caller = getcurrent()
        with TemporaryDirectory() as folder:  # it makes sure that there is one, and writes nothing
            self.trainer = _RankTrainer(model, _arguments(world, folder), self._batches(), world)
        self._running = greenlet(self.trainer.train)
        self._running.switch()  # until it asks for its first batch, with all prepared

    def train(self, batch: Batch) -> torch.Tensor:
        """See :meth:`Loop.train`: until the next batch is asked for, which is after the optimizer's step."""
        self.trainer.losses.clear()
        self._running.switch(batch)
        # Each is divided by the tokens of all microbatches.
        return torch.stack(self.trainer.losses).sum()

    def infer(self, batch: Batch) -> torch.Tensor:
        """See :meth:`Loop.infer`."""
        raise UnsupportedError("transformers' Trainer has no forward-only step, so it cannot run inference")

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's own batches, in parts; ``shift_labels`` says that targets are next tokens already."""
        parts = self.trainer.args.gradient_accumulation_steps
        while True:
            batch: Tokens = self._caller.switch()
            for part in batch.split(parts):
                yield {"input_ids": part.inputs, "labels": part.targets, "shift_labels": part.targets}


def _arguments(world: World, folder: str) -> TrainingArguments:
    case = world.case
    return TrainingArguments(
        output_dir=folder,
        max_steps=ENDLESS,
        use_cpu=world.device.type == "cpu",
        seed=case.seed,
        per_device_train_batch_size=case.global_batch // case.data_ranks // case.microbatches,
        gradient_accumulation_steps=case.microbatches,
        activation_checkpointing=case.checkpointing == "full",
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        average_tokens_across_devices=False,  # ranks have equally many
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


class _RankTrainer(Trainer):
    """``Trainer`` with what it documents as to be overridden: its batches, its optimizer, and a look at each loss.

    ``losses`` are those of the microbatches.
    """

    def __init__(
        self, model: nn.Module, arguments: TrainingArguments, batches: Iterator[dict[str, torch.Tensor]], world: World
    ) -> None:
        self._batches, self._world = batches, world
        self._modes: list[tuple[nn.Module, bool]] = []
        self.losses: list[torch.Tensor] = []
        super().__init__(model, arguments)

    def get_train_dataloader(self) -> Any:
        """See :class:`Trainer`; Accelerate would shard or broadcast what is the rank's own."""
        return self._batches

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """See :class:`Trainer`, whose own spares norms the weight decay."""
        of: Any = model or self.model
        self.optimizer = self.optimizer or make_optimizer(of, self._world.case)
        return self.optimizer

    def training_step(self, model: nn.Module, *arguments: Any, **named: Any) -> torch.Tensor:
        """See :class:`Trainer`, which begins with ``model.train()``: whether adapters drop is not its to say."""
        self._modes = [(module, module.training) for module in model.modules()]
        loss: torch.Tensor = super().training_step(model, *arguments, **named)
        self.losses.append(loss)
        return loss

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        """See :class:`Trainer`."""
        for module, mode in self._modes:
            module.training = mode
        return super().compute_loss(*arguments, **named)
