"""transformers' ``Trainer`` on a model that transformers itself shards, by its ``DistributedConfig``.

``from_pretrained(..., distributed_config=...)`` makes a model, calls ``prepare_distribute_model`` and
``maybe_distribute_model`` on it, and then loads weights. Here the model is initialised, and adapted, already, so only
those two are called. Nothing of Accelerate shards, and ``Trainer`` keeps it from wrapping again, on a CPU as on a GPU.
"""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.models.transformers_llama import llama_for_causal_lm
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.fully_sharded import ROOT, PaddedUnit, full_dtensors, sharded_units
from refshard.strategies.peers.accelerate_sharding import check_sharded, issued
from refshard.strategies.peers.hf_trainer_loop import HFTrainerLoop
from refshard.strategies.world import World


@final
class HFTrainer(Strategy):
    """Units by transformers' plan for Llama: each block, the embedding, final norm and head together.

    A tied head is the root's: transformers shards before it ties. So two units, with the final norm and the root, have
    the embedding, and each gathers and reduces it.
    """

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`. transformers shards over the default group."""
        _check(world)
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
        loop = HFTrainerLoop(self._model, world)
        check_sharded(loop.trainer.model_wrapped, loop.trainer.optimizer)
        self._world = world
        return loop

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`."""
        return tuple(unit.name for unit in self._units())

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: beside FSDP2's, the norms of all gradients, one number each, are reduced
        together, though none are clipped.
        """
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        norms = ("all_reduce", len(trained) * trained[0].itemsize)
        return count_collectives([*issued(self._units(), self._world), norms])

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        yield from full_dtensors(self._model)

    def _units(self) -> list[PaddedUnit]:
        """The units, and the root if it has the head, which as a parameter that is tied is listed but once."""
        units = sharded_units(self._model, self._world)
        if fully_shard.state(self._model)._fsdp_param_group is not None:  # type: ignore[attr-defined]
            units.append(PaddedUnit(ROOT, units[0].parameters[:1]))
        return units


def _check(world: World) -> None:
    """Check what transformers would do without asking, or not do.

    Raises:
        UnsupportedError: it cannot do what the case asks for.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != world.device.type:
        raise UnsupportedError(f"transformers always shards on the {accelerator.type} device, got {world.device}")
    if world.shards == 1:
        raise UnsupportedError("transformers' DistributedConfig shards nothing over one rank")
    if world.case.checkpointing not in ("none", "full"):
        raise UnsupportedError(
            f"Trainer's checkpointing must be 'none' or 'full' here, got {world.case.checkpointing!r}"
        )
