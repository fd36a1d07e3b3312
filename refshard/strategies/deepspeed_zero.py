"""DeepSpeed's ZeRO, stages 1 to 3, around torch's AdamW: its defaults, except that gradients are not clipped."""

import math
import os
from collections.abc import Iterator
from typing import Any, final

import torch

from refshard.errors import UnsupportedError
from refshard.models.data import Batch
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.optimizer import make_optimizer
from refshard.strategies.world import World


@final
class DeepSpeedZero(Strategy):
    """``stage`` 1 shards the optimizer's state, 2 also gradients, 3 also parameters; the unit is the parameter. Stage 1
    keeps whole gradients until a step ends; the others reduce each microbatch. ``zero`` are entries of its
    ``zero_optimization``.
    """

    def __init__(self, stage: int, **zero: Any) -> None:
        self._stage, self._zero = stage, zero

    def wrap(self, model: Llama, world: World) -> Loop:
        case = world.case
        if case.protocol.fidelity == "emulated":
            raise UnsupportedError("DeepSpeed trains over a copy of the process's default group, of real ranks only")
        if self._stage == 3 and case.job.tuning == "lora" and case.job.checkpointing != "none":
            raise UnsupportedError("ZeRO-3 with LoRA and checkpointing: what recomputation gathers has no closed form")
        if world.shards == 1:
            raise UnsupportedError("ZeRO over a single rank shards nothing")
        numels = [parameter.numel() for parameter in model.parameters()]
        for what, numel, limit, most in (
            ("its largest parameter has", max(numels), "reduce_bucket_size", 5e8),
            ("all its parameters have", sum(numels), "stage3_max_live_parameters", 1e9),
        ):
            if self._stage == 3 and numel > (most := self._zero.get(limit, most)):
                raise UnsupportedError(
                    f"refshard predicts ZeRO-3's collectives only for models within {limit} = {most:,.0f} elements, "
                    f"and {what} {numel:,}; to raise it, add a row to refshard/strategies/table.py"
                )
        os.environ.setdefault("LOCAL_RANK", str(world.group.rank()))  # it asserts that there is one
        os.environ.setdefault("DS_ACCELERATOR", world.device.type)
        import deepspeed

        # Compiling it would take a minute or two, and no collective of a step uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "train_micro_batch_size_per_gpu": case.job.global_batch // case.job.gpus // case.job.microbatches,
            "managed_gradient_accumulation": False,  # a step ends when ``step`` is called
            "gradient_clipping": 0.0,  # 1.0 if not given
            "zero_optimization": {"stage": self._stage, **self._zero},
        }
        adam = make_optimizer(model, case)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config, dist_init_required=False)
        self._world, self._optimizer = world, engine.optimizer
        self._model: Any = model.eval() if case.job.workload == "inference" else model
        return _EngineLoop(engine, case.job.microbatches)

    def wrapped_units(self) -> tuple[str, ...]:
        """The parameters that are sharded, or have sharded optimizer state."""
        if self._stage == 3:
            return tuple(n for n, p in self._model.named_parameters() if p.ds_tensor.ds_numel < p.ds_numel)
        flat = {f.untyped_storage().data_ptr() for f in self._optimizer.bit16_groups_flat}
        return tuple(n for n, p in self._model.named_parameters() if p.untyped_storage().data_ptr() in flat)

    def announced(self) -> tuple[CollectiveCount, ...]:
        """Stage 3 is steady from the third pass on. It gathers parameters above its threshold once a pass, many at a
        time, since it keeps up to 1e9 elements gathered, and those below it one by one after each step. A step takes
        the gradients' norm.
        """
        zero, case, issued = self._optimizer, self._world.case, list[tuple[str, int]]()
        trained = [p for p in self._model.parameters() if p.requires_grad][::-1]
        training, element = case.job.workload == "training", trained[0].element_size()
        if self._stage == 3:
            cut = {p: p.ds_tensor.ds_numel * self._world.shards for p in self._model.parameters()}
            ahead, limit = [n for p, n in cut.items() if not p.ds_persist], zero.parameter_offload._prefetch_bucket_sz
            issued += [("all_gather", n * element) for n in _buckets(ahead, at_least=limit)] * case.job.microbatches
            if training:
                buckets = _buckets([cut[p] for p in trained], at_most=zero.reduce_bucket_size)
                issued += [("reduce_scatter", n * element) for n in buckets] * case.job.microbatches
                issued += [("all_gather", n * element) for p, n in cut.items() if p.ds_persist]
                issued += [("all_reduce", 8)] * len(zero.fp16_groups)
        elif training:
            buckets = _buckets([p.numel() for p in trained], at_most=zero.reduce_bucket_size)
            issued += [("all_reduce", n * element) for n in buckets] * (
                case.job.microbatches if self._stage == 2 else 1
            )
            flats = zero.bit16_groups_flat
            issued += [("all_reduce", 4)] * len(flats) + [("all_gather", flat.nbytes) for flat in flats]
        return count_collectives(issued)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.runtime.zero import GatheredParameters

        for name, parameter in self._model.named_parameters():
            with GatheredParameters([parameter], enabled=self._stage == 3):
                yield name, parameter.detach().clone()


def _buckets(sizes: list[int], *, at_least: float = math.inf, at_most: float = math.inf) -> list[int]:
    """Sums of successive sizes, each ended by the size that reaches ``at_least`` or before one beyond ``at_most``."""
    found = list[int]()
    for size in sizes:
        joins = bool(found) and found[-1] < at_least and found[-1] + size <= at_most
        found.append(size + (found.pop() if joins else 0))
    return found


@final
class _EngineLoop(Loop):
    """Forward, backward and step through DeepSpeed's engine, which holds the optimizer, in ``parts`` microbatches."""

    def __init__(self, engine: Any, parts: int) -> None:
        self._engine, self._parts = engine, parts

    def train(self, batch: Batch) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for part in batch.split(self._parts):
            losses.append(part.loss(self._engine))
            (losses[-1] / self._parts).backward()
        self._engine.step()  # which also clears the gradients
        return torch.stack(losses).mean().detach()

    def infer(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return batch.loss(self._engine)
