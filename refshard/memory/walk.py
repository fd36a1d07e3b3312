"""A step's memory without a tensor: to the byte for what the plan decides, op by op for what the model computes.

One microbatch after the other is walked in the host's order: forward and backward of every layer
(:mod:`refshard.memory.activations`), with what the strategy takes and lets go of around them
(:mod:`refshard.memory.holdings`). Layers are alike, so that a model of any depth needs few lists of changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from refshard.engine.placement import MODES
from refshard.errors import SpecError
from refshard.estimate.recipe import Recipe
from refshard.estimate.units import ModelUnit, model_units
from refshard.memory.activations import Call, block_call, embedding_call, head_call, loss_call
from refshard.memory.autocast import autocast_block_call, autocast_head_call, weight_casts, widened
from refshard.memory.flat_parameters import FlatParameters
from refshard.memory.fully_shard import FullyShard
from refshard.memory.holdings import Holdings, Setting
from refshard.memory.ledger import Bytes, Ledger, MemoryEvent
from refshard.memory.slots import Slots
from refshard.memory.tape import Changes
from refshard.memory.tensors import Batch, Device, Tensors
from refshard.memory.whole import Whole
from refshard.specs.cluster import Library
from refshard.specs.hardware import Dtype
from refshard.specs.layers import NO_CHECKPOINTING, Checkpointing, Recompute
from refshard.specs.model import ELSEWHERE, ModelSpec, check_llama

ALONE = Recipe(name="single", mode=MODES["replicate"], grouping="buckets")
"""One unsharded rank that communicates nothing: no strategy, but what all are held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What one rank of ``world_size`` computes in a step, and on what.

    ``batch`` is one of its ``microbatches``. ``replicas`` is the size of the mesh's replicate axis, for strategies that
    shard. Gradients are reduced in ``reduction``, over ``library``. ``rank`` is the place on the shard axis; the first
    rank's parts are never smaller than another's.

    Raises:
        SpecError: the model is no Llama, the replicas do not divide the ranks, or a layer is checkpointed that the
            model does not have.
    """

    model: ModelSpec
    world_size: int
    batch: Batch
    microbatches: int = 1
    checkpointing: Checkpointing = NO_CHECKPOINTING
    replicas: int = 1
    reduction: Dtype = "fp32"
    device: Device = "cuda"
    library: Library = "nccl"
    rank: int = 0

    def __post_init__(self) -> None:
        check_llama(self.model, "the memory model", remedy=ELSEWHERE)
        if self.replicas < 1 or self.world_size % self.replicas:
            raise SpecError(
                f"replicas must divide the {self.world_size} ranks, got {self.replicas}; choose a number that does"
            )
        if outside := sorted(self.checkpointing.layers - set(range(self.model.n_layers))):
            raise SpecError(
                f"checkpointing: layers must lie in 0..{self.model.n_layers - 1}, got {outside[0]}; name layers that "
                "the model has"
            )


class MemoryForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted memory of one rank, in bytes as torch's allocator hands them out.

    ``peak`` is the highest sum within a step, and ``at_peak`` what it is made of. ``between_steps`` is what is held
    before a step and after it. ``events`` are the stretches of the step in the host's order. ``warnings`` say where the
    model is not what runs.
    """

    peak: int
    at_peak: Bytes
    between_steps: Bytes
    events: tuple[MemoryEvent, ...]
    warnings: tuple[str, ...] = ()


def predict_memory(job: RankJob, recipe: Recipe | None) -> MemoryForecast:
    """What one rank allocates in a training step that is not its first; without a recipe, one rank alone.

    Beside the model and its optimizer (a fused AdamW) that is the tokens of the step. What libraries keep for
    themselves (cuBLAS its workspaces) is left out, gloo's buffers excepted.
    """
    recipe = recipe or ALONE
    everywhere = recipe.mode.optimizer == "replicate"
    replicas = job.world_size if everywhere else job.replicas
    setting = Setting(
        recipe=recipe,
        units=model_units(job.model, recipe.grouping),
        shards=job.world_size // replicas,
        replicas=replicas,
        rank=0 if everywhere else job.rank,
        dtype=job.batch.dtype,
        reduction=job.reduction,
        library=job.library,
    )
    tensors = Tensors(job.model, job.batch, job.device)
    ledger = Ledger(tensors.granule)
    holdings = _holdings(setting, ledger)
    holdings.settle()
    between_steps = ledger.now
    ledger.close("between steps")
    tokens = 2 * job.microbatches * tensors.ids
    ledger.take("activations", tokens)  # of all microbatches: inputs and targets
    autocast = recipe.grouping == "buckets" and tensors.widens
    parts = _parts(setting.units, tensors, job.checkpointing, autocast=autocast)
    remembered = weight_casts(tensors) * len(job.checkpointing.layers) if autocast else ()
    walk = _Walk(setting.units, parts, loss_call(tensors, remembered), holdings, ledger)
    for index in range(job.microbatches):
        walk.microbatch(first=index == 0, last=index == job.microbatches - 1)
    holdings.drop_gradients()
    ledger.free("activations", tokens)
    ledger.close("optimizer")
    assert ledger.now == between_steps, "a step gives back what it takes"
    return MemoryForecast(
        peak=ledger.peak,
        at_peak=ledger.at_peak,
        between_steps=between_steps,
        events=tuple(ledger.events),
        warnings=_warnings(job),
    )


def _warnings(job: RankJob) -> tuple[str, ...]:
    tensors = Tensors(job.model, job.batch, job.device)
    if job.device == "cuda" and not tensors.widens and tensors.fused_attention:
        return ("attention in fp32 is counted as CUDA's flash kernel, which takes bf16 only",)
    return ()


def _holdings(setting: Setting, ledger: Ledger) -> Holdings:
    recipe = setting.recipe
    if recipe.grouping == "buckets":
        return Whole(setting, ledger)
    if recipe.divides:
        return FlatParameters(setting, ledger)
    if recipe.copies_out:
        return FullyShard(setting, ledger)
    return Slots(setting, ledger)


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer's call, the unit that it computes in, and whether it is the first or the last part of that."""

    name: str
    unit: int
    call: Call
    opens: bool = True
    closes: bool = True


def _parts(
    units: Sequence[ModelUnit], t: Tensors, checkpointing: Checkpointing, *, autocast: bool
) -> tuple[_Part, ...]:
    """The layers in forward's order. Calls of like layers are one object."""
    of_block = autocast_block_call if autocast else block_call
    of_head = autocast_head_call if autocast else head_call
    blocks = [(index, unit) for index, unit in enumerate(units) if unit.role == "block"]
    calls: dict[tuple[Recompute, bool], Call] = {}
    parts = []
    for index, unit in blocks:
        key = checkpointing.recompute(unit.layer), unit.layer == 0
        if key not in calls:
            calls[key] = of_block(t, recompute=key[0], first=key[1])
        parts.append(_Part(unit.name, index, calls[key]))
    around = units[0].role == "around"
    last = 0 if around else len(units) - 1
    return (
        _Part("embedding", 0, embedding_call(widened(t) if autocast else t), closes=not around),
        *parts,
        _Part("head", last, of_head(t), opens=not around),
    )


class _Walk:
    """Microbatch after microbatch, in the host's order."""

    def __init__(
        self, units: Sequence[ModelUnit], parts: tuple[_Part, ...], loss: Call, holdings: Holdings, ledger: Ledger
    ) -> None:
        self._units, self._parts, self._loss = units, parts, loss
        self._holdings, self._ledger = holdings, ledger
        self._missing: list[int] = []

    def microbatch(self, *, first: bool, last: bool) -> None:
        """Forward, loss and backward of one."""
        self._missing = [len(unit.parameters) for unit in self._units]
        self._holdings.open_pass(first=first, last=last)
        for part in self._parts:
            if part.opens:
                self._holdings.begin(part.unit, "forward")
            self._play(part.call.forward, part.unit)
            if part.closes:
                self._holdings.end(part.unit, "forward")
            self._ledger.close(f"forward {part.name}")
        self._holdings.forward_done()
        self._play(self._loss.forward, 0)
        self._play(self._loss.backward, 0)
        self._ledger.close("loss")
        for part in reversed(self._parts):
            if part.closes:
                self._holdings.begin(part.unit, "backward")
            self._play(part.call.backward, part.unit)
            if part.opens:
                self._holdings.end(part.unit, "backward")
            self._ledger.close(f"backward {part.name}")
        self._holdings.close_pass()
        self._ledger.close("end of backward")

    def _play(self, changes: Changes, unit: int) -> None:
        ledger = self._ledger
        for category, nbytes, arrived in changes:
            if arrived:
                self._missing[unit] -= 1
                self._holdings.gradient(unit, nbytes, completes=not self._missing[unit])
            elif nbytes > 0:
                ledger.take(category, nbytes)
            else:
                ledger.free(category, -nbytes)
