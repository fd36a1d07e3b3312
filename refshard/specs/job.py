"""A job: what is trained, on how many GPUs, and how a step is divided over them.

Every producer of results describes what it runs by a :class:`Job`: measurements and emulation, dry runs, closed forms,
published runs. Its fields are the keys of suites and the names in records, tables and options.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from refshard.specs.hardware import AttentionKernel, ProductDtype
from refshard.specs.layers import (
    POLICIES,
    POLICY,
    Checkpointing,
    checkpointing_of,
    layers_of_stages,
    stages_of_rank,
)
from refshard.specs.reading import within
from refshard.specs.tuning import ALL_LINEAR, Frozen, Lora, frozen_of, projections_of

Workload = Literal["training", "inference"]
Precision = ProductDtype
Tuning = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw-8bit", "muon", "adafactor", "sgd"]
WHOLE_MATRICES = frozenset({"muon", "adafactor"})
"""Optimizers that step whole matrices. They have closed forms only where no optimizer state is sharded."""
CommMemory = Literal["default", "allocator", "group", "symmetric"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
Policy = str | tuple[int, ...]
REFERENCE_STRATEGY = "single"
"""The strategy that all losses are compared with: one unsharded rank."""
WHOLE_BATCH = frozenset({"tensor-parallel", "pipeline"})
"""Strategies that split the model alone: all ranks work on the same tokens."""
AXES = ("dp_replicate", "tp", "cp", "pp")
"""Axes of the mesh that are given. Their product divides the number of GPUs; ``dp_shard`` is what is left."""
_COUNTS = ("gpus", *AXES, "ep", "interleave", "global_batch", "seq_len", "microbatches")


class Implementation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What code decides for itself, so that closed forms must be given it; cases and dry runs have the defaults.

    - ``compiled`` blocks have their elementwise kernels fused; eager norms are one kernel each if they are
      ``fused_norms``. ``attention`` is the kernel that computes it.
    - Gradients are reduced in ``reduction``, after each microbatch or, unless ``reduce_each``, once a step.
    - ``reshard`` frees gathered parameters between forward and backward.
    - ``overlap_tensor`` overlaps tensor parallelism's collectives with its products, in pieces. ``overlap_reduction``
      overlaps the reductions and gathers of a whole step with compute, ``overlap_pipeline`` its messages.
    - ``dispatch`` is how tokens get to experts of other ranks. By ``"copies"``, an all-to-all sends one for each
      expert. If ``"once"``, a token goes once to each rank, and over the network once to each node (DeepEP, HybridEP).
      ``"overlapped"``: while another microbatch computes. By default Megatron sends once, and overlaps what goes over
      the network; others send copies.
    - ``fp8_attention`` and ``fp8_head``: with fp8, so are the products of attention and of the head.
    - ``fused_experts``: the kernels of experts' products cast, activate, add biases and weight.
    - ``graphs`` are the CUDA graphs that launch a mixture's kernels: of its ``"routers"``, with what counts tokens for
      the dispatch; of ``"blocks"``, that is of attention, too; or of whole ``"steps"``.
    - ``recomputes`` are modules that Megatron's selective recomputation runs again, by their names in it and with
      commas between: ``mla_up_proj``, ``layernorm``, ``moe_act`` and ``mlp`` (of dense layers). It adds their time;
      what they save of memory is left out.
    - ``expert_tp`` ranks split each expert (Megatron's expert tensor parallelism); 0 is the default: ``tp`` if ``ep``
      is 1, else 1.
    - ``stages`` are the layers of a pipeline's stages in order, modules of multi-token prediction last, as in
      ``"4*15,2"``: 15 stages of 4, and one of 2. By default, they are even, or with the ends counted as layers.
    - ``context_by`` says whether ranks that share sequences pass keys and values round a ring, or exchange heads for
      tokens.
    """

    compiled: bool = False
    fused_norms: bool = True
    attention: AttentionKernel = "flash"
    reduction: Literal["fp32", "bf16"] = "fp32"
    reduce_each: bool = True
    reshard: bool = True
    overlap_tensor: bool = False
    overlap_reduction: bool = True
    overlap_pipeline: bool = True
    context_by: Literal["ring", "exchange"] = "ring"
    dispatch: Literal["default", "copies", "copies-overlapped", "once", "once-overlapped"] = "default"
    fp8_attention: bool = False
    fp8_head: bool = False
    fused_experts: bool = False
    graphs: Literal["none", "routers", "blocks", "steps"] = "none"
    recomputes: str = ""
    expert_tp: int = 0
    stages: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is trained, on how many GPUs (ranks, on a CPU), and how a step is divided over them.

    The mesh has torchtitan's axes; ``refshard list strategies`` says which strategies have which.

    - ``dp_replicate`` is hybrid sharding: as many groups of ranks shard, and replicate to each other. It is 1 for a
      strategy that shards nothing. The strategy shards over the :attr:`dp_shard` ranks that are left, and over ``cp``.
    - ``tp`` ranks that follow each other split every block's matrices; each such group is one rank to the strategy.
      All ranks of a strategy in :data:`WHOLE_BATCH` work on the same tokens. With ``sequence_parallel`` they split
      norms and the residual stream by sequence too, and the loss by vocabulary.
    - ``cp`` ranks split every sequence.
    - ``pp`` ranks each hold ``interleave`` stages of layers, and pass the microbatches of a step from one to the next
      in the order of ``schedule``.
    - ``ep`` ranks that follow each other divide a mixture's experts, whole, and have their data alone: torchtitan's and
      Megatron's expert tensor parallelism of 1. With ``ep`` 1, ``tp`` ranks split each expert like a block's matrices.

    The batch:

    - ``global_batch`` is in sequences per step over all ranks, so the loss curve does not depend on ``gpus``.
    - ``microbatches`` is the number of parts of each rank's batch. Their gradients are accumulated before one
      optimizer step.
    - ``workload`` is training, or inference: forward and loss under ``no_grad``, no backward and no optimizer step.

    Memory and numerics:

    - ``checkpointing`` says which layers keep their input only and compute their activations again in backward:
      ``"none"``, ``"full"``, ``"every-K"`` (each K-th layer), ``"first-N"`` (the first N layers of each pipeline
      rank), or the layers' indices. With ``"selective"`` all layers keep attention's output and every second matrix
      product's too, as torchtitan's selective checkpointing by operator does.
    - ``precision`` is what parameters are gathered and computed in; masters, reductions and optimizer state are fp32,
      except for bf16 adapters, which have no other master.
    - ``tuning`` trains all parameters (``"full"``); or LoRA adapters of ``lora_rank`` on the ``lora_targets`` of each
      block (:func:`~refshard.specs.tuning.projections_of`), with the bases frozen (``"lora"``) and, with ``"qlora"``,
      in NF4 with double quantisation.
    - ``frozen`` names parts that are not trained: ``"embedding"``, ``"head"``, and ``"first-N"``, the first N layers
      with the embedding; with commas between.
    - ``optimizer`` is AdamW, AdamW with 8-bit state, Muon for the matrices of the blocks and AdamW for all else,
      Adafactor, or SGD with a momentum of 0.9.
    - ``offload`` keeps masters, gradients and optimizer state in the host's memory.
    - ``comm_memory`` is what collectives gather to and reduce from: by default what the strategy takes by itself;
      torch's caching allocator's (``"allocator"``), the process group's (``"group"``), or symmetric memory, with
      gathers by copy engines (``"symmetric"``). A knob of one strategy alone is not a field: each
      setting is a strategy of its own.

    ``cluster`` names a cluster's profile: the job fills its first ``gpus`` GPUs; a measured job has none.

    Raises:
        ValueError: fields do not go together; the message names the field, its value and the rule.
    """

    strategy: str
    model: str
    gpus: int
    cluster: str = ""
    global_batch: int
    seq_len: int = 256
    microbatches: int = 1
    workload: Workload = "training"
    dp_replicate: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    interleave: int = 1
    schedule: Schedule = "1f1b"
    ep: int = 1
    checkpointing: Policy = "none"
    precision: Precision = "fp32"
    tuning: Tuning = "full"
    lora_rank: int = Lora().rank
    lora_targets: str = ALL_LINEAR
    frozen: str = ""
    optimizer: Optimizer = "adamw"
    offload: bool = False
    comm_memory: CommMemory = "default"
    implementation: Implementation = Implementation()

    def __post_init__(self) -> None:
        for field in _COUNTS:
            within(field, getattr(self, field), 1)
        self._check_ranks()
        self._check_batch()
        self._check_sequence()
        self._check_pipeline()
        self._check_policy()
        self._check_workload()
        self._check_tuning()

    def _check_ranks(self) -> None:
        """Check that the ranks can be divided as requested."""
        if self.strategy == REFERENCE_STRATEGY and self.gpus != 1:
            raise ValueError(f"gpus must be 1 for strategy '{REFERENCE_STRATEGY}', got {self.gpus}")
        axes = {name: size for name in AXES if (size := getattr(self, name)) > 1}
        product, words = math.prod(axes.values()), " * ".join(axes)
        if self.gpus % product:
            sizes = " * ".join(map(str, axes.values()))
            raise ValueError(f"gpus must be a multiple of {words} = {sizes}, got {self.gpus}")
        if self.dp_replicate > 1 and product // self.cp == self.gpus:
            raise ValueError(
                f"dp_replicate must leave 2 or more ranks to shard over, got {self.dp_replicate} of {self.gpus}; to "
                "shard nothing, use 'ddp' or 'refshard-replicate'"
            )
        if self.strategy in WHOLE_BATCH and axes:
            raise ValueError(
                f"{next(iter(axes))} must be 1 for strategy '{self.strategy}', which splits the model over all ranks, "
                f"got {next(iter(axes.values()))}"
            )
        split, given = max(1, self.implementation.expert_tp), " * expert_tp" * bool(self.implementation.expert_tp)
        if (ranks := self.data_ranks * self.cp * self.tp_ranks) % (self.ep * split):
            raise ValueError(
                f"ep{given} must divide dp_replicate * dp_shard * cp * tp = {ranks}, got {self.ep * split}; choose a "
                "divisor"
            )

    def _check_batch(self) -> None:
        """That the batch can be divided over the ranks."""
        ranks, parts = self.data_ranks, self.microbatches
        if self.global_batch % (ranks * parts):
            words = "gpus" if ranks == self.gpus else "data-parallel ranks"
            by = (
                f"{words} * microbatches = {ranks} * {parts}"
                if self.global_batch % ranks == 0
                else f"{words} = {ranks}"
            )
            raise ValueError(f"global_batch must be a multiple of {by}, got {self.global_batch}")

    def _check_sequence(self) -> None:
        """Check that ranks can divide the sequences as requested."""
        if self.sequence_parallel and self.tp_ranks == 1:
            raise ValueError("sequence_parallel must be false unless tp is 2 or more, got true")
        # Each context rank has a piece from the front and one from the back, so that all attend to the same number.
        pieces = 2 * self.cp if self.cp > 1 else 1
        pieces *= self.tp_ranks if self.sequence_parallel else 1
        if self.seq_len % pieces:
            raise ValueError(f"seq_len must be a multiple of {pieces}, to be split over ranks, got {self.seq_len}")

    def _check_pipeline(self) -> None:
        """That the schedule fits the stages."""
        if self.pp_ranks == 1 and (self.interleave > 1 or self.schedule != "1f1b"):
            raise ValueError(
                f"interleave must be 1 and schedule '1f1b' without a pipeline, got {self.interleave} and "
                f"'{self.schedule}'; set pp"
            )
        if self.schedule != "zero-bubble" and (self.schedule == "1f1b") != (self.interleave == 1):
            raise ValueError(
                "interleave must be 1 for schedule '1f1b' and at least 2 for 'interleaved', got "
                f"{self.interleave} for '{self.schedule}'"
            )
        if self.implementation.stages and self.pp_ranks == 1:
            raise ValueError(f"stages must be empty without a pipeline, got {self.implementation.stages!r}; set pp")

    def _check_policy(self) -> None:
        policy = self.checkpointing
        if isinstance(policy, str) and not POLICY.fullmatch(policy):
            raise ValueError(f"checkpointing must be {POLICIES}, got {policy!r}")
        if isinstance(policy, tuple) and (not policy or min(policy) < 0 or len(set(policy)) < len(policy)):
            raise ValueError(
                f"checkpointing must list one or more distinct layers, counted from 0, got {list(policy)}; "
                "write 'none' for no layer"
            )

    def _check_workload(self) -> None:
        if self.workload == "inference":
            for field, only in (("microbatches", 1), ("checkpointing", "none"), ("optimizer", "adamw")):
                if (given := getattr(self, field)) != only:
                    raise ValueError(
                        f"{field} must be {only!r} for workload 'inference', which has no backward, got {given!r}"
                    )

    def _check_tuning(self) -> None:
        within("lora_rank", self.lora_rank, 1)
        projections_of(self.lora_targets)
        for field in ("lora_rank", "lora_targets"):
            default = next(one.default for one in msgspec.structs.fields(self) if one.name == field)
            if self.tuning == "full" and (given := getattr(self, field)) != default:
                raise ValueError(f"{field} needs tuning 'lora' or 'qlora', got {given!r} for 'full'; set tuning")
        if frozen_of(self.frozen) != Frozen():
            alone = {"tuning": "full", "workload": "training", "tp": 1, "cp": 1, "pp": 1, "ep": 1, "offload": False}
            for field, only in alone.items():
                if (given := getattr(self, field)) != only:
                    raise ValueError(f"{field} must be {only!r} with frozen parts, got {given!r}; change it, or frozen")
        if self.optimizer == "muon" and self.tuning != "full":
            raise ValueError(
                f"optimizer must not be 'muon' for tuning '{self.tuning}': Muon orthogonalises updates of whole weight "
                "matrices, not of adapters; use 'adamw'"
            )

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained; None if all parameters are."""
        if self.tuning == "full":
            return None
        return Lora(rank=self.lora_rank, projections=projections_of(self.lora_targets))

    @property
    def frozen_parts(self) -> Frozen:
        """What is not trained."""
        return frozen_of(self.frozen)

    @property
    def tp_ranks(self) -> int:
        """How many ranks split each matrix."""
        return self.gpus if self.strategy == "tensor-parallel" else self.tp

    @property
    def pp_ranks(self) -> int:
        """How many ranks pass each microbatch on."""
        return self.gpus if self.strategy == "pipeline" else self.pp

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the batch is divided; the others work on the tokens of one of these."""
        return self.gpus // (self.pp_ranks * self.cp * self.tp_ranks)

    @property
    def dp_shard(self) -> int:
        """Ranks that divide the batch within one of the ``dp_replicate`` groups."""
        return self.data_ranks // self.dp_replicate

    @property
    def microbatch(self) -> int:
        """Sequences of a rank's microbatch."""
        return self.global_batch // self.data_ranks // self.microbatches

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The first rank of each pipeline rank's; the others of its own compute alike."""
        return tuple(range(0, self.gpus, self.gpus // self.pp_ranks))

    def checkpointed(self, n_layers: int) -> Checkpointing:
        """The layers that recompute, of a model of ``n_layers``.

        Raises:
            SpecError: the policy names layers that the model, or every pipeline rank, does not have.
        """
        policy = self.checkpointing
        if self.pp_ranks == 1 or not (isinstance(policy, str) and policy.startswith("first-")):
            return checkpointing_of(policy, n_layers)
        stages = layers_of_stages(n_layers, self.pp_ranks * self.interleave, self.implementation.stages)
        held = [
            [layer for stage in stages_of_rank(rank, self.pp_ranks, self.interleave) for layer in stages[stage]]
            for rank in range(self.pp_ranks)
        ]
        # Ranks at the ends may hold a layer less; such a rank recomputes all that it has.
        count = len(checkpointing_of(policy, max(map(len, held))).layers)
        return Checkpointing(frozenset(layer for own in held for layer in own[:count]))


@dataclass(frozen=True, slots=True)
class Option:
    """A way to depart from plain training: a row of :data:`OPTIONS`.

    ``head`` is the heading of its column in tables, ``about`` says what it is. ``text`` says how a job departs, for
    names and labels; empty if it does not.
    """

    name: str
    head: str
    about: str
    text: Callable[[Job], str]


def _sized(words: str, field: str) -> Callable[[Job], str]:
    """The text of an axis: its ``words``, with the size in them."""
    return lambda job: words.format(size) if (size := getattr(job, field)) > 1 else ""


def _chosen(name: str, field: str) -> Callable[[Job], str]:
    """The text of one value of a field: the value."""
    return lambda job: name if getattr(job, field) == name else ""


def _policy_text(job: Job) -> str:
    policy = job.checkpointing
    if isinstance(policy, tuple):
        policy = f"of layers {'+'.join(map(str, policy[:8]))}{'+...' if len(policy) > 8 else ''}"
    return "" if policy == "none" else f"checkpointing {policy}"


def _schedule_text(job: Job) -> str:
    if job.schedule == "1f1b":
        return ""
    return job.schedule if job.interleave == 1 else f"{job.schedule} {job.interleave}"


def _tuning_text(job: Job, tuning: Tuning) -> str:
    if job.tuning != tuning:
        return ""
    rank = f" rank {job.lora_rank}" if job.lora_rank != Lora().rank else ""
    return f"{tuning}{rank}{f' on {job.lora_targets}' if job.lora_targets != ALL_LINEAR else ''}"


OPTIONS = {
    option.name: option
    for option in (
        Option("inference", "infer", "inference", _chosen("inference", "workload")),
        Option("microbatches", "micro", "microbatches", _sized("{} microbatches", "microbatches")),
        Option("checkpointing", "ckpt", "activation checkpointing", _policy_text),
        Option("bf16", "bf16", "bf16 over fp32 masters", _chosen("bf16", "precision")),
        Option("lora", "lora", "LoRA", lambda job: _tuning_text(job, "lora")),
        Option("qlora", "qlora", "LoRA on NF4 bases", lambda job: _tuning_text(job, "qlora")),
        Option("frozen", "frz", "frozen parts", lambda job: f"frozen {job.frozen}" if job.frozen else ""),
        Option("adamw-8bit", "8-bit", "AdamW with 8-bit state", _chosen("adamw-8bit", "optimizer")),
        Option("muon", "muon", "Muon", _chosen("muon", "optimizer")),
        Option("adafactor", "adaf", "Adafactor", _chosen("adafactor", "optimizer")),
        Option("sgd", "sgd", "SGD with momentum", _chosen("sgd", "optimizer")),
        Option("offload", "offl", "offloading to the host", lambda job: "offload" if job.offload else ""),
        Option("dp_replicate", "repl", "replicas (hybrid sharding)", _sized("{} replicas", "dp_replicate")),
        Option("tp", "tp", "tensor parallelism", _sized("tensor parallel {}", "tp")),
        Option(
            "sequence_parallel", "sp", "sequence parallelism",
            lambda job: "sequence parallel" if job.sequence_parallel else "",
        ),
        Option("cp", "cp", "context parallelism", _sized("context parallel {}", "cp")),
        Option("pp", "pp", "pipeline parallelism", _sized("pipeline {}", "pp")),
        Option("schedule", "sched", "interleaved and zero-bubble schedules", _schedule_text),
        Option(
            "comm_memory", "mem", "memory of the process group, or symmetric memory, for collectives",
            lambda job: "" if job.comm_memory == "default" else f"{job.comm_memory} memory",
        ),
    )
}  # fmt: skip
"""How a job may depart from plain training, in the order in which names and tables have it."""
