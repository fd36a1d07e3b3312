"""Time and memory of a module that was counted (:class:`~refshard.specs.counted.CountedModel`), under data parallelism.

Kernels are priced by the laws that dry runs price them by (``costs.py``).
"""

from dataclasses import dataclass

from refshard.costs import attention_seconds, move_seconds, product_seconds, strided_seconds
from refshard.errors import SpecError
from refshard.plan.cost_models import COST_MODELS, MASTER_BYTES
from refshard.plan.kernels import Share
from refshard.plan.layers import LayerTimes
from refshard.plan.memory import LayerMemory
from refshard.plan.space import Candidates
from refshard.specs.counted import CountedModel, Counts, Moment, Operator, Pass
from refshard.specs.hardware import HardwareSpec

_ALLOWED = {
    "tuning": ("full",), "optimizer": ("adamw", "adamw-8bit", "sgd"), "precision": ("bf16", "fp32"),
    "strategy": tuple(name for name in COST_MODELS if name not in ("megatron", "simplefsdp", "simplefsdp-by-block")),
}  # fmt: skip


def check_counted(model: CountedModel, rows: Candidates) -> None:
    """Check that closed forms know these rows of a counted module.

    Raises:
        SpecError: they do not.
    """
    rule = f"for '{model.name}', whose operators are counted"
    remedy = "leave it out, or give the dimensions in a TOML file: --model mine.toml"
    for axis in ("tp", "cp", "pp", "ep"):
        if (rows[axis] > 1).any():
            raise SpecError(f"{axis} must be 1 {rule}, got {rows[axis].max()}; {remedy}")
    for field, known in _ALLOWED.items():
        other = next((one for one in rows.labels[field] if one not in known and rows.where(field, one).any()), None)
        if other is not None:
            raise SpecError(f"{field} must be {' or '.join(known)} {rule}, got {other}; {remedy}")
    if any(rows.labels["frozen"]):
        raise SpecError(f"frozen must be empty {rule}, got '{max(rows.labels['frozen'])}'; {remedy}")
    if rows.flag("compiled").any() or rows.where("checkpointing", "selective").any():
        raise SpecError(
            f"compile and checkpointing: the operators of '{model.name}' are counted as they run eagerly, so blocks "
            "can neither be compiled nor checkpointed by operator; leave out --compile yes and selective"
        )


class CountedCosts:
    """Times of a counted module's parts, as :class:`~refshard.plan.layers.LayerCosts` has those of a decoder's."""

    def __init__(self, hardware: HardwareSpec, counts: Counts) -> None:
        self._hardware, self._counts = hardware, counts
        passes = [(1, counts.before), (1, counts.after)]
        passes += [(block.number, one) for block in counts.blocks for one in (block.forward, block.backward)]
        device_s = sum(number * self._device_s(one) for number, one in passes)
        # The host runs ahead, so only its time for a whole microbatch can be too long.
        host_s = sum(number * one.host for number, one in passes) * hardware.host_s * hardware.asynchronous
        self._slower = max(1.0, host_s / device_s)

    def layer(self) -> LayerTimes:
        """The average block."""
        blocks = self._counts.blocks
        number = sum(block.number for block in blocks)

        def mean(field: str) -> float:
            return sum(block.number * self._seconds(getattr(block, field)) for block in blocks) / number

        return LayerTimes(
            forward_s=mean("forward"), input_s=mean("backward"), weight_s=0.0, full_s=mean("again")
        )  # fmt: skip

    def ends(self) -> tuple[float, float]:
        """Seconds of both passes before the blocks, and after them."""
        return self._seconds(self._counts.before), self._seconds(self._counts.after)

    def _seconds(self, given: Pass) -> float:
        return self._slower * self._device_s(given)

    def _device_s(self, given: Pass) -> float:
        return sum(map(self._operator, given.operators))

    def _operator(self, one: Operator) -> float:
        hardware = self._hardware
        if one.kind == "product":
            return product_seconds(hardware, one.dtype, one.flops, one.nbytes)
        moved = move_seconds(hardware, one.nbytes)
        if one.kind == "move":
            return max(moved, strided_seconds(hardware, one.strided))
        attention = attention_seconds(
            hardware, one.dtype, heads=one.heads, seq_len=one.length, head_dim=one.head_dim, backward=one.backward,
            kernel=one.kernel,
        )  # fmt: skip
        return max(attention, moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedMemory:
    """A block's memory, and elements of gradients that have come at its moments ``after_product`` and
    ``after_feed_forward``: when its backward needs most, without and with its gradients. Bytes of the ends: as the
    fields of :class:`~refshard.plan.memory.Held`.
    """

    layer: LayerMemory
    down: float
    feed_forward: float
    outputs: float
    loss: float
    cast_loss: float
    of_head: float
    scattering: float


def counted_memory(model: CountedModel, counts: Counts, share: Share, *, casts: bool) -> CountedMemory:
    """The memory of one block and of both ends, for one microbatch."""
    element = MASTER_BYTES if casts else share.element
    grown_by = 0 if casts else element  # those of autocast go to DDP's buckets, one by one

    def grown(moment: Moment) -> float:
        return moment.nbytes + grown_by * moment.gradients

    moments = [(moment, block.left) for block in counts.blocks for moment in block.moments]
    highest, _ = max(moments, key=lambda pair: pair[0].nbytes)
    most, left = max(moments, key=lambda pair: grown(pair[0]))
    ending = max((one.nbytes for one in counts.ending), default=0.0)
    with_head = [grown(one) for one in counts.loss if one.gradients]
    return CountedMemory(
        layer=LayerMemory(
            none=counts.kept, selective=counts.kept, full=counts.given, workspace=highest.nbytes,
            after_product=highest.nbytes, after_feed_forward=most.nbytes, after_layer=left, delayed=0.0,
        ),
        down=highest.gradients, feed_forward=most.gradients, outputs=counts.entered, cast_loss=ending,
        loss=max(ending, *(one.nbytes for one in counts.loss)), of_head=max(with_head, default=0.0),
        scattering=max((grown(one) for one in counts.passed), default=0.0) - grown_by * model.embedding,
    )  # fmt: skip
