"""Loss parity if one unsharded rank cannot be the reference: the same case with a reduced model, on the same ranks.

After the measurement the ranks train the reduced model in fp32, sharded as in the case, and rank 0 trains it once more,
unsharded. The losses must be the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from refshard.measure.trainer import Trainer, compiling_anew
from refshard.quantities import format_bytes
from refshard.records import Environment
from refshard.specs.case import Case
from refshard.specs.model import ModelSpec, is_factory, load_model, makes_scores
from refshard.strategies import strategy_for

USABLE = 0.9
"""The share of a device's memory that the reference may need."""
_LAYERS = 2
_SEQ_LEN = 128


def reduced_file(folder: Path) -> Path:
    """The file in a launch's folder that holds the :class:`Reduced` to train too."""
    return folder / "reduced.json"


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """The case that stands in for another in the comparison of losses, its model, and why it is needed."""

    case: Case
    model: ModelSpec
    why: str

    @property
    def text(self) -> str:
        """What is reduced to what."""
        model = self.model
        return (
            f"the same case reduced to {model.n_layers} layers of width {model.dim}, a vocabulary of {model.vocab:,}, "
            f"{self.case.job.seq_len} tokens a sequence and fp32"
        )


class ReducedLosses(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's losses of the reduced case, one per step; on rank 0 also those without sharding, or its error."""

    losses: tuple[float, ...]
    reference: tuple[float, ...] = ()
    error: str = ""


def reduced_for(case: Case, environment: Environment) -> Reduced | None:
    """The reduced case of a measured case with a too large reference; None if the reference fits, or if a factory makes
    the model, since that cannot be reduced.
    """
    job = case.job
    if is_factory(job.model):
        return None
    kind: Literal["cuda", "cpu"] = "cuda" if environment.gpus and case.protocol.device != "cpu" else "cpu"
    memory = min(environment.gpu_memory_bytes, default=0) if kind == "cuda" else environment.memory_bytes
    needed = _reference_bytes(case, kind)
    if not memory or needed <= USABLE * memory:
        return None
    whole = load_model(job.model)
    reduced = case.changed(
        checkpointing="full" if isinstance(job.checkpointing, tuple) else job.checkpointing,
        precision="fp32",
        seq_len=min(job.seq_len, _SEQ_LEN),
        data="synthetic",
    )
    return Reduced(
        case=reduced,
        model=whole.reduced(max(_LAYERS, job.pp_ranks * job.interleave)),
        why=f"one unsharded rank would need about {format_bytes(needed)}, and has {format_bytes(memory)}",
    )


def _reference_bytes(case: Case, device: Literal["cuda", "cpu"]) -> int:
    """An upper estimate of the memory of a case's unsharded fp32 reference.

    A reference that does not fit costs a launch and its proof; a reduced one proves nearly as much. All of AdamW is
    counted, although adapters and other optimizers need less.
    """
    job = case.job
    model, tokens = load_model(job.model), job.global_batch * job.seq_len
    logits = 4 * tokens * model.vocab
    unfused = makes_scores(model, fp32=True, device=device)
    scores = 4 * tokens * job.seq_len * model.n_heads if unfused else 0
    if job.workload == "inference":
        return 4 * model.params + max(2 * logits, 4 * scores)
    # Besides AdamW's state: the embedding's gradient twice, what each layer's backward reads, and the logits or one
    # layer's scores with their gradients.
    widths = 8 * model.dim + 4 * model.n_heads * model.head_dim + 4 * model.ffn_dim
    kept = model.n_layers * (4 * tokens * widths + scores)
    return 16 * model.params + 8 * model.vocab * model.dim + kept + 3 * max(logits, scores)


def losses_of(
    reduced: Reduced, group: dist.ProcessGroup, device: torch.device, progress: Callable[[str, int, int], None]
) -> ReducedLosses:
    """Train the reduced case on all ranks, and on rank 0 without sharding. The others do not wait for that."""
    with compiling_anew():
        losses = _train(reduced.case, reduced.model, group, device, progress)
        if group.rank() != 0:
            return ReducedLosses(losses=losses)
        try:
            reference = _train(reduced.case.reference(), reduced.model, group, device, progress)
        except Exception as error:  # not the case's fault
            return ReducedLosses(losses=losses, error=f"{type(error).__name__}: {error}".partition("\n")[0])
        return ReducedLosses(losses=losses, reference=reference)


def _train(
    case: Case,
    model: ModelSpec,
    group: dist.ProcessGroup,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> tuple[float, ...]:
    trainer = Trainer(case, model, strategy_for(case, cuda=device.type == "cuda"), group, device)
    for step in range(case.protocol.warmup_steps):
        progress("parity", step, case.protocol.warmup_steps)
        trainer.timed_step(aligned=False)
    return tuple(trainer.losses)
