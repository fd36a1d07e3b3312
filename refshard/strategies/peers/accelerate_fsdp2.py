"""Hugging Face Accelerate's FSDP2 plugin, called as its documentation does: ``prepare``, ``accumulate``, ``backward``.

On a CPU, where Accelerate would not shard, two attributes of its state are set from here, those that it sets on a GPU;
see :mod:`refshard.strategies.peers.accelerate_sharding`. All else, from units to optimizer, is its own code.
"""

from collections.abc import Iterator
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from refshard.errors import UnsupportedError
from refshard.models.batch import Batch, Tokens
from refshard.models.llama import Llama, next_token_loss
from refshard.models.transformers_llama import BLOCK, bare_name, llama_for_causal_lm
from refshard.records import CollectiveCount
from refshard.specs.case import CaseSpec
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.fully_sharded import full_dtensors, sharded_units
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.peers.accelerate_sharding import check_accelerator, check_sharded, issued, shard_on_cpu
from refshard.strategies.world import World


@final
class AccelerateFSDP2(Strategy):
    """Units as Accelerate makes them: each block, the embedding, final norm and head together; a tied embedding is
    with those.
    """

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`. Accelerate shards model and optimizer together, over the default group."""
        _check(world.case)
        on_cpu = world.device.type == "cpu"
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
            cpu_offload=CPUOffloadPolicy(pin_memory=not on_cpu) if world.case.offload else False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[BLOCK],
            activation_checkpointing=world.case.checkpointing == "full",
            # Accelerate's own for "bf16" would reduce in bf16 too.
            mixed_precision_policy=MixedPrecisionPolicy(world.computed, world.reduced) if world.mixed else None,
        )
        AcceleratorState._reset_state(True)  # another case in this process may have left its own
        accelerator = Accelerator(
            cpu=on_cpu,
            fsdp_plugin=plugin,
            mixed_precision="bf16" if world.mixed else "no",
            gradient_accumulation_steps=world.case.microbatches,
        )
        if on_cpu:
            shard_on_cpu(accelerator, plugin)
        theirs = llama_for_causal_lm(model)
        self._model, optimizer = accelerator.prepare(theirs, make_optimizer(theirs, world.case))
        check_sharded(self._model, optimizer)
        check_accelerator(accelerator)
        self._world = world
        return _AccelerateLoop(accelerator, self._model, optimizer, world.case)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(bare_name(unit.name) for unit in sharded_units(self._model, self._world))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`."""
        return count_collectives(issued(sharded_units(self._model, self._world), self._world))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from ((bare_name(name), value) for name, value in full_dtensors(self._model))


@final
class _AccelerateLoop(Loop):
    """The loop of Accelerate's documentation: gradients stay whole until the last microbatch's are reduced."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, case: CaseSpec) -> None:
        self._accelerator, self._model, self._optimizer, self._parts = accelerator, model, optimizer, case.microbatches
        if case.workload == "inference":
            model.eval()

    def train(self, batch: Batch) -> torch.Tensor:
        """See :meth:`Loop.train`."""
        losses = []
        for part in batch.split(self._parts):
            with self._accelerator.accumulate(self._model):
                loss = self._loss(part)
                self._accelerator.backward(loss)  # which divides it by the number of microbatches
                self._optimizer.step()  # which does nothing before the last microbatch, as zero_grad
                self._optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def infer(self, batch: Batch) -> torch.Tensor:
        """See :meth:`Loop.infer`."""
        with torch.no_grad():
            return self._loss(batch)

    def _loss(self, batch: Batch) -> torch.Tensor:
        assert isinstance(batch, Tokens)
        return next_token_loss(self._model(input_ids=batch.inputs).logits, batch.targets)


def _check(case: CaseSpec) -> None:
    if case.checkpointing not in ("none", "full"):
        raise UnsupportedError(f"Accelerate's checkpointing must be 'none' or 'full', got {case.checkpointing!r}")
    if case.checkpointing == "full" and case.tuning != "full":
        raise UnsupportedError(
            "Accelerate checkpoints with preserve_rng_state=False, so recomputation would draw a different dropout "
            "mask for the adapters than forward"
        )
