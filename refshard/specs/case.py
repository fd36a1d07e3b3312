"""One case: one run of one strategy, complete in itself and identified by the hash of its content."""

import hashlib
import math
import re
from typing import Literal

import msgspec

from refshard.specs.configuration import Schedule
from refshard.specs.reading import LARGEST, within

Device = Literal["auto", "cpu", "cuda"]
Workload = Literal["training", "inference"]
Fidelity = Literal["measured", "emulated", "dryrun", "simulated"]
"""Only records of earlier versions have ``simulated`` cases, predicted in closed form; no suite can ask for one."""
Precision = Literal["fp32", "bf16"]
Tuning = Literal["full", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw-8bit", "muon"]
CommMemory = Literal["default", "allocator", "group", "symmetric"]
REFERENCE_STRATEGY = "single"
"""The strategy that every other one's losses are held against: one unsharded rank."""
WHOLE_BATCH = frozenset({"tensor-parallel", "pipeline"})
"""Strategies that split the model alone: all ranks work on the same tokens."""
REPEATING: frozenset[Fidelity] = frozenset({"dryrun", "simulated"})
"""Fidelities of which a second launch says nothing new: all times are calculated."""
_AXES = ("replicas", "tensor_parallel", "context_parallel", "pipeline_parallel")
"""Fields whose product divides the number of ranks."""
_COUNTS = (
    "world_size", "global_batch", "seq_len", "microbatches", "replicas", "tensor_parallel", "context_parallel",
    "pipeline_parallel", "interleave", "threads_per_rank", "measured_steps", "traced_steps",
)  # fmt: skip
_ADDED = (
    "precision", "tuning", "optimizer", "offload", "replicas", "tensor_parallel", "sequence_parallel",
    "context_parallel", "pipeline_parallel", "interleave", "schedule", "comm_memory",
)  # fmt: skip
"""Fields that count for a spec's hash only where they are given, so that specs keep the hash that they had before."""


class CaseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One run: what is computed, how it is sharded, and what is measured.

    ``global_batch`` is in sequences per step over all ranks, so the loss curve does not depend on ``world_size``.
    The ``warmup_steps`` are also the steps whose losses prove parity with one unsharded rank, hence at least 10.

    Axes beside strategy and world size change what a step does; which strategies have which, ``refshard list
    strategies`` says.

    - ``workload`` is training, or inference: forward and loss under ``no_grad``, no backward and no optimizer step.
    - ``microbatches`` is the number of parts of each rank's batch whose gradients are accumulated before one optimizer
      step.
    - ``checkpointing`` says which layers keep their input only and compute their activations again in backward:
      ``"none"``, ``"full"``, ``"every-K"`` (each K-th layer), or the layers' indices; with ``"selective"`` all layers
      keep attention's output and every second matrix product's too, as torchtitan's selective checkpointing by
      operator does.
    - ``precision`` is what parameters are gathered and computed in; masters, reductions and optimizer state are fp32,
      but for those of bf16 adapters, which have no other master.
    - ``tuning`` trains all parameters (``"full"``); or LoRA adapters on every linear of the blocks, whose bases are
      frozen (``"lora"``) and, with ``"qlora"``, in NF4 with double quantisation.
    - ``optimizer`` is AdamW, AdamW with 8-bit state, or Muon for the matrices of the blocks and AdamW for all else.
    - ``offload`` keeps masters, gradients and optimizer state in the host's memory.
    - ``replicas`` is hybrid sharding: as many groups of ranks shard, and replicate to each other.
    - ``tensor_parallel`` ranks that follow each other split every block's matrices; each such group is one rank to the
      strategy. All ranks of a strategy in :data:`WHOLE_BATCH` work on the same tokens. With ``sequence_parallel`` they
      split norms and the residual stream by sequence too, and the loss by vocabulary.
    - ``context_parallel`` ranks split every sequence; the strategy shards over them too.
    - ``pipeline_parallel`` ranks each hold ``interleave`` stages of layers, and pass the microbatches of a step from
      one to the next in the order of ``schedule``.
    - ``comm_memory`` is what collectives gather to and reduce from: by default what the strategy takes by itself;
      torch's caching allocator's (``"allocator"``), the process group's (``"group"``), or symmetric memory, with
      gathers by copy engines (``"symmetric"``). Knobs that one strategy alone has are no axis but rows of their own.

    A case that is not measured takes place on ``cluster``, a profile of which ``world_size`` ranks are filled.
    Emulated, ``resident_ranks`` of them are processes here, each of which computes as one rank of the world and waits
    for the others as long as the profile says. In a dry run rank 0 is, on a GPU of the cluster that is not there.
    """

    strategy: str
    world_size: int
    model: str
    global_batch: int
    seq_len: int = 256
    workload: Workload = "training"
    microbatches: int = 1
    checkpointing: str | tuple[int, ...] = "none"
    precision: Precision = "fp32"
    tuning: Tuning = "full"
    optimizer: Optimizer = "adamw"
    offload: bool = False
    replicas: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    pipeline_parallel: int = 1
    interleave: int = 1
    schedule: Schedule = "1f1b"
    comm_memory: CommMemory = "default"
    fidelity: Fidelity = "measured"
    cluster: str = ""
    resident_ranks: int = 1
    seed: int = 0
    data: str = "synthetic"
    learning_rate: float = 1e-3
    device: Device = "auto"
    threads_per_rank: int = 1
    warmup_steps: int = 10
    measured_steps: int = 20
    traced_steps: int = 3
    time_limit_s: float = 600.0
    memory_limit_gib: float | None = None

    def __post_init__(self) -> None:
        for field in _COUNTS:
            within(field, getattr(self, field), 1)
        within("warmup_steps", self.warmup_steps, 10)
        within("seed", self.seed, 0)
        self._check_ranks()
        self._check_batch()
        self._check_sequence()
        self._check_pipeline()
        self._check_axes()
        self._check_fidelity()
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must lie between 0 and 1, got {self.learning_rate}")
        if not 0 < self.time_limit_s < LARGEST:
            raise ValueError(f"time_limit_s must be > 0 and finite, got {self.time_limit_s}")
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < LARGEST:
            raise ValueError(f"memory_limit_gib must be > 0 and finite, got {self.memory_limit_gib}")

    def _check_fidelity(self) -> None:
        if (self.fidelity == "measured") == bool(self.cluster):
            given = f"'{self.cluster}'" if self.cluster else "none"
            raise ValueError(
                "cluster must be given for emulated and dryrun cases and for no others, got fidelity "
                f"'{self.fidelity}' and cluster {given}"
            )
        within("resident_ranks", self.resident_ranks, 1, most=self.world_size)
        if self.fidelity != "emulated" and self.resident_ranks != 1:
            raise ValueError(f"resident_ranks must be 1 unless emulated, got {self.resident_ranks} for {self.fidelity}")
        if self.fidelity == "dryrun" and self.device == "cpu":
            raise ValueError("device must be 'auto' or 'cuda' for dryrun cases, whose device is a GPU, got 'cpu'")

    def _check_ranks(self) -> None:
        """That the ranks can be divided as asked, and the batch over them."""
        if self.strategy == REFERENCE_STRATEGY and self.world_size != 1:
            raise ValueError(f"world_size must be 1 for strategy '{REFERENCE_STRATEGY}', got {self.world_size}")
        axes = {name: size for name in _AXES if (size := getattr(self, name)) > 1}
        product, words = math.prod(axes.values()), " * ".join(axes)
        if self.world_size % product:
            sizes = " * ".join(map(str, axes.values()))
            raise ValueError(f"world_size must be a multiple of {words} = {sizes}, got {self.world_size}")
        if self.replicas > 1 and product // self.context_parallel == self.world_size:
            raise ValueError(
                f"replicas must leave 2 or more ranks to shard over, got {self.replicas} of {self.world_size}; to "
                "shard nothing, use 'ddp' or 'refshard-replicate'"
            )
        if self.strategy in WHOLE_BATCH and axes:
            raise ValueError(
                f"{next(iter(axes))} must be 1 for strategy '{self.strategy}', which splits the model over all ranks, "
                f"got {next(iter(axes.values()))}"
            )
        if self.fidelity == "emulated":
            for name in (*_AXES[1:], "sequence_parallel"):
                if (given := getattr(self, name)) > 1 or given is True:
                    raise ValueError(
                        f"{name} must be {'false' if given is True else 1} for an emulated case, got "
                        f"{str(given).lower()}; use fidelity 'dryrun'"
                    )

    def _check_batch(self) -> None:
        """That the batch can be divided over the ranks."""
        ranks, parts = self.data_ranks, self.microbatches
        if self.global_batch % (ranks * parts):
            words = "world_size" if ranks == self.world_size else "data-parallel ranks"
            by = (
                f"{words} * microbatches = {ranks} * {parts}"
                if self.global_batch % ranks == 0
                else f"{words} = {ranks}"
            )
            raise ValueError(f"global_batch must be a multiple of {by}, got {self.global_batch}")

    def _check_sequence(self) -> None:
        """That ranks can divide the sequences as asked."""
        if self.sequence_parallel and self.tensor_ranks == 1:
            raise ValueError("sequence_parallel must be false unless tensor_parallel is 2 or more, got true")
        # Each context rank has a piece from the front and one from the back, for they attend to the same number.
        pieces = 2 * self.context_parallel if self.context_parallel > 1 else 1
        pieces *= self.tensor_ranks if self.sequence_parallel else 1
        if self.seq_len % pieces:
            raise ValueError(f"seq_len must be a multiple of {pieces}, to be split over ranks, got {self.seq_len}")

    def _check_pipeline(self) -> None:
        """That the schedule fits the stages."""
        if self.pipeline_ranks == 1 and (self.interleave > 1 or self.schedule != "1f1b"):
            raise ValueError(
                f"interleave must be 1 and schedule '1f1b' without a pipeline, got {self.interleave} and "
                f"'{self.schedule}'; set pipeline_parallel"
            )
        if self.schedule != "zero-bubble" and (self.schedule == "1f1b") != (self.interleave == 1):
            raise ValueError(
                "interleave must be 1 for schedule '1f1b' and at least 2 for 'interleaved', got "
                f"{self.interleave} for '{self.schedule}'"
            )

    def _check_axes(self) -> None:
        policy = self.checkpointing
        if isinstance(policy, str) and not re.fullmatch(r"none|full|selective|every-[1-9]\d{0,5}", policy):
            raise ValueError(
                f"checkpointing must be 'none', 'full', 'selective', 'every-K' or a list of layers, got {policy!r}"
            )
        if isinstance(policy, tuple) and (not policy or min(policy) < 0 or len(set(policy)) < len(policy)):
            raise ValueError(
                f"checkpointing must list one or more distinct layers, counted from 0, got {list(policy)}; "
                "write 'none' for no layer"
            )
        if self.workload == "inference":
            for field, only in (("microbatches", 1), ("checkpointing", "none"), ("optimizer", "adamw")):
                if (given := getattr(self, field)) != only:
                    raise ValueError(
                        f"{field} must be {only!r} for workload 'inference', which has no backward, got {given!r}"
                    )
        if self.optimizer == "muon" and self.tuning != "full":
            raise ValueError(
                f"optimizer must not be 'muon' for tuning '{self.tuning}': Muon orthogonalises updates of whole weight "
                "matrices, not of adapters; use 'adamw'"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """In words, how this case departs from plain training; empty for most."""
        words: list[str] = [] if self.workload == "training" else [self.workload]
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if isinstance(self.checkpointing, tuple):
            listed = "+".join(map(str, self.checkpointing[:8]))
            words.append(f"checkpointing of layers {listed}{'+...' if len(self.checkpointing) > 8 else ''}")
        elif self.checkpointing != "none":
            words.append(f"checkpointing {self.checkpointing}")
        if self.precision != "fp32":
            words.append(self.precision)
        if self.tuning != "full":
            words.append(self.tuning)
        if self.optimizer != "adamw":
            words.append(self.optimizer)
        if self.offload:
            words.append("offload")
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas")
        if self.tensor_parallel > 1:
            words.append(f"tensor parallel {self.tensor_parallel}")
        if self.sequence_parallel:
            words.append("sequence parallel")
        if self.context_parallel > 1:
            words.append(f"context parallel {self.context_parallel}")
        if self.pipeline_parallel > 1:
            words.append(f"pipeline {self.pipeline_parallel}")
        if self.schedule != "1f1b":
            words.append(self.schedule if self.interleave == 1 else f"{self.schedule} {self.interleave}")
        if self.comm_memory != "default":
            words.append(f"{self.comm_memory} memory")
        if self.fidelity != "measured":
            words.append(f"{spelled(self.fidelity)} on {self.cluster}")
        if self.resident_ranks > 1:
            words.append(f"{self.resident_ranks} ranks resident")
        return tuple(words)

    @property
    def _added(self) -> tuple[str, ...]:
        """The fields of :data:`_ADDED` that are given."""
        later = {f.name: f.default for f in msgspec.structs.fields(self) if f.name in _ADDED}
        return tuple(name for name, default in later.items() if getattr(self, name) != default)

    @property
    def name(self) -> str:
        """A short name, unique within a suite that varies only strategy, world size, model, batch and axes."""
        plain = f"{self.strategy}-w{self.world_size}-{self.model}-b{self.global_batch}x{self.seq_len}"
        return "-".join([plain, *self.axes]).replace(" ", "-").replace("/", "_").replace(":", ".")

    @property
    def hash(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of the spec's canonical JSON, which has what is not given too,
        except of fields that came later.
        """
        fields, added = msgspec.structs.asdict(self), self._added
        given = {name: value for name, value in fields.items() if name not in _ADDED or name in added}
        canonical = msgspec.json.encode(given, order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the batch is divided; the others work on the tokens of one of these."""
        return self.world_size // (self.pipeline_ranks * self.context_parallel * self.tensor_ranks)

    @property
    def tensor_ranks(self) -> int:
        """How many ranks split each matrix."""
        return self.world_size if self.strategy == "tensor-parallel" else self.tensor_parallel

    @property
    def pipeline_ranks(self) -> int:
        """How many ranks pass each microbatch on."""
        return self.world_size if self.strategy == "pipeline" else self.pipeline_parallel

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The first rank of each pipeline rank's, which tells of the others of its own: they compute alike."""
        return tuple(range(0, self.world_size, self.world_size // self.pipeline_ranks))

    @property
    def processes(self) -> int:
        """How many processes a launch of this case starts."""
        return {"measured": self.world_size, "emulated": self.resident_ranks}.get(self.fidelity, 1)

    @property
    def total_steps(self) -> int:
        """Optimizer steps before the traced pass."""
        return self.warmup_steps + self.measured_steps

    def as_dry_run(self, cluster: str) -> "CaseSpec":
        """This measured case as a dry run on ``cluster``."""
        return msgspec.structs.replace(self, fidelity="dryrun", cluster=cluster)

    def reference(self) -> "CaseSpec":
        """The same batches on one unsharded rank, which this case's losses must equal.

        It accumulates and recomputes nothing, and computes in fp32: none of it may change a loss, but for the rounding
        of bf16, so the proof covers them too. What is trained, and by which optimizer, is the same. No limit of memory
        holds for it. It is measured: no other fidelity has losses that mean anything.
        """
        return msgspec.structs.replace(
            self,
            strategy=REFERENCE_STRATEGY,
            world_size=1,
            microbatches=1,
            checkpointing="none",
            precision="fp32",
            offload=False,
            replicas=1,
            tensor_parallel=1,
            sequence_parallel=False,
            context_parallel=1,
            pipeline_parallel=1,
            interleave=1,
            schedule="1f1b",
            comm_memory="default",
            memory_limit_gib=None,
            fidelity="measured",
            cluster="",
            resident_ranks=1,
        )


def spelled(fidelity: Fidelity) -> str:
    """A fidelity as people read it.

    >>> spelled("dryrun"), spelled("measured")
    ('dry run', 'measured')
    """
    return "dry run" if fidelity == "dryrun" else fidelity
