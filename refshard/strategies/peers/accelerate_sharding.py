"""What is specific to models that Hugging Face's libraries shard: how Accelerate comes to, and the proof that it did.

Accelerate 1.15 does not shard on a CPU. ``AcceleratorState`` turns nine distributed types into FSDP, and MULTI_CPU is
none of them; without ``cpu=True`` it takes a CPU for one process. Either way it trains on without a word: as DDP, whose
losses equal FSDP2's to the bit, or each rank for itself.
"""

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from refshard.errors import RefshardError
from refshard.models.transformers_llama import BLOCK
from refshard.strategies.fully_sharded import ROOT, PaddedUnit, announce_reduction
from refshard.strategies.world import World

_TAIL = "model.norm"
"""Is in the unit that backward begins with, with the head, or with the embedding that is the head."""


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Give Accelerate's state the two attributes that ``AcceleratorState`` would give it on any other device."""
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):  # the first overwrites the second each time that it is asked for
        state.distributed_type = DistributedType.FSDP


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that Accelerate takes itself to shard: what it accumulates by, and clips by, asks for that again.

    Raises:
        RefshardError: it does not.
    """
    if not accelerator.is_fsdp2:
        raise RefshardError(
            f"Accelerate must see FSDP2, got the distributed type {accelerator.distributed_type}; set the type on "
            "PartialState and on AcceleratorState"
        )


def check_sharded(model: nn.Module, optimizer: Any) -> None:
    """Check that the model is sharded by FSDP2, blocks as units, and that the optimizer steps what is sharded.

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

    A microbatch gathers each unit for forward, and again for backward but for the one that backward begins with; only
    the last one is reduced. Without backward nothing reshards that unit, so only the first pass gathers it.
    """
    gathers: list[tuple[str, int]] = []
    reduced: list[tuple[str, int]] = []
    training = world.case.workload == "training"
    for unit in units:
        kept = unit.name == ROOT or _TAIL in unit.name.split("+")
        gathers += unit.gathers(world, training + (not kept))
        reduced += announce_reduction(unit, world) if training else ()
    return gathers * world.case.microbatches + reduced
