"""Hugging Face Accelerate's FSDP2 plugin, called as its documentation does: ``prepare``, ``accumulate``, ``backward``.

Accelerate 1.15 does not shard on a CPU. ``AcceleratorState`` turns nine distributed types into FSDP, but not MULTI_CPU;
without ``cpu=True`` it takes a CPU for one process. Either way it silently trains on: as DDP, whose losses equal
FSDP2's to the bit, or each rank for itself. So on a CPU :func:`shard_on_cpu` sets the two attributes of its state that
it sets on a GPU, and :func:`check_sharded` proves that it sharded. All else, from units to optimizer, is its own code.
"""

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from refshard.errors import RefshardError, UnsupportedError
from refshard.models.data import Batch, Tokens
from refshard.models.llama import Llama, next_token_loss
from refshard.models.transformers_llama import BLOCK, bare_name, llama_for_causal_lm
from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.fully_sharded import ROOT, PaddedUnit, full_dtensors, sharded_units
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.world import World


@final
class AccelerateFSDP2(Strategy):
    """Units as Accelerate makes them: each block, the embedding, final norm and head together; a tied embedding is
    with those.
    """

    def wrap(self, model: Llama, world: World) -> Loop:
        """Accelerate shards model and optimizer together, over the default group."""
        case, on_cpu = world.case, world.device.type == "cpu"
        if case.job.checkpointing not in ("none", "full"):
            raise UnsupportedError(
                f"Accelerate's checkpointing must be 'none' or 'full', got {case.job.checkpointing!r}"
            )
        if case.job.checkpointing == "full" and case.job.tuning != "full":
            raise UnsupportedError(
                "Accelerate checkpoints with preserve_rng_state=False, so recomputation would draw a different dropout "
                "mask for the adapters than forward"
            )
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False,
            cpu_offload=CPUOffloadPolicy(pin_memory=not on_cpu) if case.job.offload else False,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[BLOCK],
            activation_checkpointing=case.job.checkpointing == "full",
            # Accelerate's own for "bf16" would reduce in bf16 too.
            mixed_precision_policy=MixedPrecisionPolicy(world.computed, world.reduced) if world.mixed else None,
        )  # fmt: skip
        AcceleratorState._reset_state(True)  # another case in this process may have left its own
        accelerator = Accelerator(
            cpu=on_cpu, fsdp_plugin=plugin, mixed_precision="bf16" if world.mixed else "no",
            gradient_accumulation_steps=case.job.microbatches,
        )  # fmt: skip
        if on_cpu:
            shard_on_cpu(accelerator, plugin)
        theirs = llama_for_causal_lm(model)
        self._model, optimizer = accelerator.prepare(theirs, make_optimizer(theirs, case))
        check_sharded(self._model, optimizer)
        check_accelerator(accelerator)
        self._world = world
        return _AccelerateLoop(accelerator, self._model, optimizer, case)

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(bare_name(unit.name) for unit in sharded_units(self._model, self._world))

    def announced(self) -> tuple[CollectiveCount, ...]:
        return count_collectives(issued(sharded_units(self._model, self._world), self._world))

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((bare_name(name), value) for name, value in full_dtensors(self._model))


@final
class _AccelerateLoop(Loop):
    """The loop of Accelerate's documentation: gradients stay whole until the last microbatch's are reduced."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, case: Case) -> None:
        job = case.job
        self._accelerator, self._model, self._optimizer, self._parts = accelerator, model, optimizer, job.microbatches
        if job.workload == "inference":
            model.eval()

    def train(self, batch: Batch) -> torch.Tensor:
        losses = []
        for part in batch.split(self._parts):
            with self._accelerator.accumulate(self._model):
                loss = self._loss(part)
                self._accelerator.backward(loss)  # divides it by the number of microbatches
                self._optimizer.step()  # like zero_grad, does nothing before the last microbatch
                self._optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def infer(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return self._loss(batch)

    def _loss(self, batch: Batch) -> torch.Tensor:
        assert isinstance(batch, Tokens)
        return next_token_loss(self._model(input_ids=batch.inputs).logits, batch.targets)


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Give Accelerate's state the two attributes that ``AcceleratorState`` would give it on any other device."""
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):  # the first overwrites the second at each access
        state.distributed_type = DistributedType.FSDP


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that Accelerate believes that it shards: its accumulation and its clipping ask for that again.

    Raises:
        RefshardError: it does not.
    """
    if not accelerator.is_fsdp2:
        raise RefshardError(
            f"Accelerate must see FSDP2, got the distributed type {accelerator.distributed_type}; set the type on "
            "PartialState and on AcceleratorState"
        )


def check_sharded(model: nn.Module, optimizer: Any) -> None:
    """Check that FSDP2 shards the model, blocks as units, and that the optimizer steps the sharded parameters.

    Raises:
        RefshardError: it is replicated, left as it was, sharded in part, or not what the optimizer holds.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise RefshardError("the model was replicated: it is a DistributedDataParallel, not FSDP2's")
    if not isinstance(model, FSDPModule):
        raise RefshardError(f"the model was left as it was: {type(model).__name__} is no FSDPModule")
    blocks = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith(BLOCK)]
    if whole := [name for name, module in blocks if not isinstance(module, FSDPModule)]:
        raise RefshardError(f"no unit was made of {whole[0]}")
    if whole := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        raise RefshardError(f"{whole[0]} was not sharded")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held != {id(parameter) for parameter in model.parameters() if parameter.requires_grad}:
        raise RefshardError("the optimizer does not hold the sharded parameters that are trained")


def issued(units: Iterable[PaddedUnit], world: World) -> list[tuple[str, int]]:
    """``(op, bytes)`` of all collectives of FSDP2 in a step.

    A microbatch gathers each unit for forward, and again for backward, except the unit that backward begins with; only
    the last microbatch is reduced. Without backward nothing reshards that unit, so only the first pass gathers it.
    """
    gathers: list[tuple[str, int]] = []
    reduced: list[tuple[str, int]] = []
    training = world.case.job.workload == "training"
    for unit in units:
        kept = unit.name == ROOT or "model.norm" in unit.name.split("+")  # with the head, tied or not
        gathers += unit.gathers(world, training + (not kept))
        reduced += unit.reductions(world) if training else ()
    return gathers * world.case.job.microbatches + reduced
