"""What each part of a program takes on a cluster: compute by its kernels, copies by their bytes, collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from refshard.costs import CollectiveCost, GroupShape, collective_cost, group_shape, move_seconds, optimizer_seconds
from refshard.plan.checkpointing import Recompute
from refshard.plan.recipe import MASTER_BYTES, Recipe
from refshard.plan.schedule import Phase
from refshard.plan.units import ModelUnit, Role
from refshard.simulate import kernels
from refshard.simulate.kernels import Batch, Kernel
from refshard.specs.cluster import ClusterSpec, CollectiveOp
from refshard.specs.hardware import ELEMENT_BYTES, Dtype
from refshard.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as it is issued: the operation, elements of the unsharded tensor, ranks, and what it takes."""

    op: CollectiveOp
    numel: int
    dtype: Dtype
    ranks: int
    cost: CollectiveCost

    @property
    def bytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return self.numel * ELEMENT_BYTES[self.dtype]


class Pricing:
    """Durations of one strategy's step of one model on one cluster.

    ``batch`` is one microbatch of one rank; its dtype is that of parameters in compute. Gradients are reduced in
    ``reduction``. The ranks are a mesh of ``replicas`` times ``shards``, shards side by side; a recipe that shards
    nothing replicates over all of them.
    """

    def __init__(
        self, recipe: Recipe, model: ModelSpec, cluster: ClusterSpec, batch: Batch, reduction: Dtype, replicas: int = 1
    ) -> None:
        world_size = cluster.world_size
        self.replicas = world_size if recipe.mode.optimizer == "replicate" else replicas
        self.shards = world_size // self.replicas
        self._recipe, self._model, self._cluster, self._batch = recipe, model, cluster, batch
        self._hardware = cluster.accelerator
        self._reduction: Dtype = reduction
        self._element, self._reduced = batch.element_bytes, ELEMENT_BYTES[reduction]
        self._shard_shape = _widest(
            cluster, [range(r * self.shards, (r + 1) * self.shards) for r in range(self.replicas)]
        )
        self._replica_shape = group_shape(cluster, range(0, world_size, self.shards))
        self._compute: dict[tuple[Role, Phase, Recompute], float] = {}

    @property
    def asynchronous(self) -> bool:
        """Whether the host runs ahead of the device."""
        return self._hardware.asynchronous

    def awaits(self, what: Literal["gather", "reduce"]) -> bool:
        """Whether a collective is awaited where it is issued."""
        recipe = self._recipe
        return self._gloo and (recipe.awaits_gathers if what == "gather" else recipe.awaits_reductions)

    def compute(self, role: Role, phase: Phase, recompute: Recompute = "nothing") -> float:
        """Seconds of one phase of one unit; backward of a checkpointed block begins with what it computes again."""
        key = (role, phase, recompute)
        if key not in self._compute:
            self._compute[key] = self._seconds(_kernels(self._model, self._batch, *key))
        return self._compute[key]

    def optimizer(self, units: tuple[ModelUnit, ...]) -> float:
        """Seconds of the optimizer's step on this rank's shards."""
        return optimizer_seconds(self._hardware, sum(unit.numel for unit in units) / self.shards)

    def own_part(self, unit: ModelUnit) -> float:
        """Seconds to bring this rank's shard where it is gathered from, in the dtype that it is gathered in."""
        needed = self.casts or (self.shards > 1 and (self._gloo or not self._recipe.flat))
        return self.cast(self._numel(unit) / self.shards) if needed else 0.0

    @property
    def casts(self) -> bool:
        """Whether parameters are computed with in another dtype than their masters'."""
        return self._element != MASTER_BYTES

    def cast(self, numel: float) -> float:
        """Seconds to copy as many elements from the masters' dtype to that of compute, or back."""
        return self.move((MASTER_BYTES + self._element) * numel)

    def copy_out(self, unit: ModelUnit) -> float:
        """Seconds to copy a gathered unit into its parameters."""
        return self.move(2 * self._element * self._numel(unit)) if self._recipe.copies_out else 0.0

    def copy_in(self, unit: ModelUnit) -> float:
        """Seconds to copy a unit's gradients into the buffer that is reduced."""
        written = self._element if self._recipe.divides else self._reduced
        return self.move((self._element + written) * self._numel(unit)) if self._recipe.copies_in else 0.0

    def divide(self, unit: ModelUnit) -> float:
        """Seconds of the kernels that cast and divide that buffer beside compute."""
        if not self._recipe.divides or self.shards == 1:
            return 0.0
        cast = self._element + self._reduced if self._element != self._reduced else 0
        return self.move((cast + 2 * self._reduced) * self._numel(unit))

    def local_sum(self, unit: ModelUnit) -> float:
        """Seconds to add up the parts that an exchange brought."""
        if not (self._gloo and self._recipe.exchanges_reductions and self.shards > 1):
            return 0.0
        return self.move(3 * self._reduced * self._numel(unit) * (self.shards - 1) / self.shards)

    def move(self, nbytes: float) -> float:
        """Seconds to read and write ``nbytes`` in all."""
        return move_seconds(self._hardware, nbytes)

    def gradient_bytes(self, numel: int) -> int:
        """Bytes of as many gradients as they are reduced."""
        return numel * self._reduced

    def gather(self, unit: ModelUnit) -> Call:
        """The all-gather of a unit over the shard axis."""
        exchanged = self._gloo and self._recipe.exchanges_gathers
        return self._call("all_gather", self._numel(unit), self._batch.dtype, self.shards, exchanged=exchanged)

    def reduce(self, unit: ModelUnit) -> Call:
        """The reduction of a unit's gradients over the shard axis, or over all replicas where nothing is sharded."""
        if self.shards == 1:
            return self.all_reduce(self._numel(unit))
        exchanged = self._gloo and self._recipe.exchanges_reductions
        return self._call("reduce_scatter", self._numel(unit), self._reduction, self.shards, exchanged=exchanged)

    def combine(self, unit: ModelUnit) -> Call:
        """The all-reduce of a unit's reduced shard over the replicate axis."""
        return self.all_reduce(self._numel(unit) // self.shards)

    def all_reduce(self, numel: int) -> Call:
        """An all-reduce of gradients over the replicate axis."""
        return self._call("all_reduce", numel, self._reduction, self.replicas)

    @property
    def _gloo(self) -> bool:
        return self._cluster.library == "gloo"

    def _numel(self, unit: ModelUnit) -> int:
        return unit.gathered_numel(self._recipe, self.shards)

    def _seconds(self, listed: tuple[Kernel, ...]) -> float:
        return kernels.seconds(listed, self._hardware, self._batch.dtype)

    def _call(self, op: CollectiveOp, numel: int, dtype: Dtype, ranks: int, *, exchanged: bool = False) -> Call:
        shape = self._replica_shape if op == "all_reduce" else self._shard_shape
        cost = collective_cost(self._cluster, "exchange" if exchanged else op, numel * ELEMENT_BYTES[dtype], shape)
        return Call(op, numel, dtype, ranks, cost)


def _widest(cluster: ClusterSpec, groups: Sequence[range]) -> GroupShape:
    """The shape of the group that lies on most nodes: where groups do not fill nodes evenly, it is the slowest."""
    return max((group_shape(cluster, group) for group in groups), key=lambda shape: (shape.nodes, shape.ranks))


def _kernels(model: ModelSpec, batch: Batch, role: Role, phase: Phase, recompute: Recompute) -> tuple[Kernel, ...]:
    if role == "embedding":
        return (kernels.embedding_forward if phase == "forward" else kernels.embedding_backward)(model, batch)
    if role == "head":
        return (kernels.head_forward if phase == "forward" else kernels.head_backward)(model, batch)
    if phase == "forward":
        return kernels.block_forward(model, batch)
    again = kernels.block_recompute(model, batch, by_op=recompute == "some") if recompute != "nothing" else ()
    return (*again, *kernels.block_backward(model, batch))
