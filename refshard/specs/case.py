"""One case: one run of one strategy, complete in itself and identified by the hash of its content."""

import hashlib
import re
from typing import Literal

import msgspec

from refshard.specs.reading import LARGEST, within

Device = Literal["auto", "cpu", "cuda"]
Workload = Literal["training", "inference"]
Fidelity = Literal["measured", "emulated", "simulated"]
REFERENCE_STRATEGY = "single"
"""The strategy that every other one's losses are held against: one unsharded rank."""
_COUNTS = (
    "world_size", "global_batch", "seq_len", "microbatches", "threads_per_rank", "measured_steps", "traced_steps"
)  # fmt: skip


class CaseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: what is computed, how it is sharded, and what is measured.

    ``global_batch`` is in sequences per step over all ranks, so the loss curve does not depend on ``world_size``.
    The ``warmup_steps`` are also the steps whose losses prove parity with one unsharded rank, hence at least 10.

    Three axes beside strategy and world size change what a step does. ``workload`` is training, or inference: forward
    and loss under ``no_grad``, no backward and no optimizer step. ``microbatches`` is the number of parts of each
    rank's batch whose gradients are accumulated before one optimizer step. ``checkpointing`` says which layers keep
    their input only and compute their activations again in backward: ``"none"``, ``"full"``, ``"every-K"`` (each K-th
    layer), or the layers' indices.

    A case that is not measured takes place on ``cluster``, a profile of which ``world_size`` ranks are filled.
    Emulated, ``resident_ranks`` of them are processes here, each of which computes as one rank of the world and waits
    for the others as long as the profile says; simulated, none is.
    """

    strategy: str
    world_size: int
    model: str
    global_batch: int
    seq_len: int = 256
    workload: Workload = "training"
    microbatches: int = 1
    checkpointing: str | tuple[int, ...] = "none"
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
        if self.strategy == REFERENCE_STRATEGY and self.world_size != 1:
            raise ValueError(f"world_size must be 1 for strategy '{REFERENCE_STRATEGY}', got {self.world_size}")
        if self.global_batch % self.world_size:
            raise ValueError(
                f"global_batch must be a multiple of world_size = {self.world_size}, got {self.global_batch}"
            )
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
                f"cluster must be given for emulated and simulated cases and for no others, got fidelity "
                f"'{self.fidelity}' and cluster {given}"
            )
        within("resident_ranks", self.resident_ranks, 1, most=self.world_size)
        if self.fidelity != "emulated" and self.resident_ranks != 1:
            raise ValueError(f"resident_ranks is for emulated cases, got {self.resident_ranks} for {self.fidelity}")

    def _check_axes(self) -> None:
        if self.global_batch % (self.world_size * self.microbatches):
            raise ValueError(
                f"global_batch must be a multiple of world_size * microbatches = {self.world_size} * "
                f"{self.microbatches}, got {self.global_batch}"
            )
        policy = self.checkpointing
        if isinstance(policy, str) and not re.fullmatch(r"none|full|every-[1-9]\d{0,5}", policy):
            raise ValueError(f"checkpointing must be 'none', 'full', 'every-K' or a list of layers, got {policy!r}")
        if isinstance(policy, tuple) and (not policy or min(policy) < 0 or len(set(policy)) < len(policy)):
            raise ValueError(
                f"checkpointing must list different layers, counted from 0, at least one of them, got {list(policy)}; "
                "write 'none' for no layer"
            )
        if self.workload == "inference":
            for field, only in (("microbatches", 1), ("checkpointing", "none")):
                if (given := getattr(self, field)) != only:
                    raise ValueError(
                        f"{field} must be {only!r} for workload 'inference', which has no backward, got {given!r}"
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
        if self.fidelity != "measured":
            words.append(f"{self.fidelity} on {self.cluster}")
        if self.resident_ranks > 1:
            words.append(f"{self.resident_ranks} ranks resident")
        return tuple(words)

    @property
    def name(self) -> str:
        """A short name, unique within a suite that varies only strategy, world size, model, batch and axes."""
        plain = f"{self.strategy}-w{self.world_size}-{self.model}-b{self.global_batch}x{self.seq_len}"
        return "-".join([plain, *self.axes]).replace(" ", "-").replace("/", "_")

    @property
    def hash(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of the spec's canonical JSON."""
        canonical = msgspec.json.encode(self, order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]

    @property
    def processes(self) -> int:
        """How many processes a launch of this case starts."""
        return {"measured": self.world_size, "emulated": self.resident_ranks, "simulated": 0}[self.fidelity]

    @property
    def total_steps(self) -> int:
        """Optimizer steps before the traced pass."""
        return self.warmup_steps + self.measured_steps

    def reference(self) -> "CaseSpec":
        """The same batches on one unsharded rank, which this case's losses must equal.

        It accumulates and recomputes nothing: neither may change a loss, so the proof covers them too. It is measured:
        what is emulated or simulated has no losses that mean anything.
        """
        return msgspec.structs.replace(
            self,
            strategy=REFERENCE_STRATEGY,
            world_size=1,
            microbatches=1,
            checkpointing="none",
            fidelity="measured",
            cluster="",
            resident_ranks=1,
        )
