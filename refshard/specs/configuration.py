"""One way to train a model on a cluster: how a step is split over the ranks, and what each rank does at once."""

import re
from typing import Literal

import msgspec

from refshard.specs.hardware import AttentionKernel
from refshard.specs.reading import within

Precision = Literal["fp32", "bf16", "fp8"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
AXES = ("replicate", "shard", "context", "tensor", "pipeline")
"""The axes of the mesh; the product of their sizes is the number of ranks. Expert parallelism divides ranks of the
replicate, shard and context axes anew, so it is not among them."""
_CHECKPOINTING = re.compile(r"none|selective|full|every-[1-9]\d{0,5}|[1-9]\d{0,5}")


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sizes of the mesh's axes, the batch, and what is traded for memory.

    - ``strategy`` is the data-parallel strategy (``refshard list strategies``). It shards over ``shard * context``
      ranks and replicates over ``replicate``; one that shards nothing replicates over all.
    - ``tensor`` ranks split every block's matrices, and norms and residuals by sequence between them.
    - ``context`` ranks split every sequence. ``expert`` ranks divide a mixture's experts.
    - ``pipeline`` ranks each hold ``interleave`` stretches of layers. ``schedule`` orders their microbatches.
    - ``microbatch`` is in sequences, ``microbatches`` how many each data-parallel rank computes a step.
    - ``checkpointing`` is ``"none"``, ``"selective"`` (by operator), ``"full"``, ``"every-K"`` (each K-th layer), or a
      number: that many of a stage's layers.
    - ``precision`` is that of products, over fp32 masters; gradients are reduced in ``reduction``, after each
      microbatch or, unless ``reduce_each``, once a step.
    - ``reshard`` frees gathered parameters between forward and backward. ``offload`` keeps masters, gradients and the
      optimizer's state in the host's memory.
    - ``compiled`` blocks have their elementwise kernels fused; eager norms are one kernel each if they are
      ``fused_norms``. ``attention`` is the kernel that computes it. ``overlap_tensor`` runs tensor parallelism's
      collectives beside its products, in pieces. ``context_by`` says whether ranks that share sequences pass keys and
      values round a ring, or exchange heads for tokens.
    - ``overlap_reduction`` runs the reductions and gathers of a whole step beside compute, ``overlap_pipeline`` its
      messages.
    """

    strategy: str
    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    interleave: int = 1
    schedule: Schedule = "1f1b"
    microbatch: int = 1
    microbatches: int = 1
    checkpointing: str = "none"
    precision: Precision = "bf16"
    reduction: Literal["fp32", "bf16"] = "fp32"
    reduce_each: bool = True
    reshard: bool = True
    compiled: bool = False
    fused_norms: bool = True
    attention: AttentionKernel = "flash"
    overlap_tensor: bool = False
    overlap_reduction: bool = True
    overlap_pipeline: bool = True
    context_by: Literal["ring", "exchange"] = "ring"
    offload: bool = False

    def __post_init__(self) -> None:
        for field in (*AXES, "expert", "interleave", "microbatch", "microbatches"):
            within(field, getattr(self, field), 1)
        if not _CHECKPOINTING.fullmatch(self.checkpointing):
            raise ValueError(
                "checkpointing must be 'none', 'selective', 'full', 'every-K' or a number of layers, got "
                f"{self.checkpointing!r}; choose one of them"
            )
        if self.schedule != "zero-bubble" and (self.schedule == "1f1b") != (self.interleave == 1):
            raise ValueError(
                "interleave must be 1 for schedule '1f1b' and at least 2 for 'interleaved', got "
                f"{self.interleave} for '{self.schedule}'; change either"
            )
        if self.interleave > 1 and self.pipeline == 1:
            raise ValueError(
                f"interleave must be 1 without a pipeline, got {self.interleave}; set pipeline to 2 or more"
            )
        if self.data_ranks * self.context % self.expert:
            raise ValueError(
                f"expert must divide replicate * shard * context = {self.data_ranks * self.context}, got "
                f"{self.expert}; choose a divisor"
            )

    @property
    def data_ranks(self) -> int:
        """Ranks that divide the batch."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data_ranks * self.context * self.tensor * self.pipeline

    @property
    def global_batch(self) -> int:
        """Sequences of a step, of all ranks."""
        return self.data_ranks * self.microbatch * self.microbatches
