"""A case: a job, and the protocol by which it is run. It is complete in itself and identified by its hash."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Self

import msgspec

from refshard.errors import SpecError, nearest
from refshard.quantities import GIB, parse_bytes, parse_count
from refshard.specs.cluster import cluster_name
from refshard.specs.hardware import LOW_BYTES
from refshard.specs.job import OPTIONS, REFERENCE_STRATEGY, Implementation, Job
from refshard.specs.model import model_name
from refshard.specs.reading import LARGEST, convert, read_as, within

Device = Literal["auto", "cpu", "cuda"]
Fidelity = Literal["measured", "emulated", "dryrun", "simulated"]
"""Only records of earlier versions have ``simulated`` cases, predicted in closed form; no suite can ask for one."""
REPEATING: frozenset[Fidelity] = frozenset({"dryrun", "simulated"})
"""Fidelities with calculated times: a second launch would give the same."""
FIRST_NAMES = {
    "gpus": "world_size", "dp_replicate": "replicas", "tp": "tensor_parallel", "cp": "context_parallel",
    "pp": "pipeline_parallel",
}  # fmt: skip
"""What records of schema 1, and so the hashes of cases, call fields that have another name now."""
RENAMED = {first: now for now, first in FIRST_NAMES.items()}
_OTHER_NAMES = {**RENAMED, "dtype": "precision", "ranks": "gpus", "nodes": "gpus", "accumulate": "microbatches"}
_FIRST = frozenset(
    ("strategy", "gpus", "model", "global_batch", "seq_len", "workload", "microbatches", "checkpointing", "cluster",
     "fidelity", "resident_ranks", "seed", "data", "learning_rate", "device", "threads_per_rank", "warmup_steps",
     "measured_steps", "traced_steps", "time_limit_s", "memory_limit_gib")
)  # fmt: skip
"""Fields that always count for a case's hash. Others count only where they are set, so that old hashes stay valid."""


class Protocol(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a job is run, and what is measured.

    The losses of the ``warmup_steps`` also prove parity with one unsharded rank, hence at least 10 steps.

    A job that is not measured runs on its ``cluster``. Emulated, ``resident_ranks`` of its ranks are processes here,
    each computes as one rank of the world and waits for the others as long as the profile says. In a dry run
    rank 0 is, on a GPU of the cluster that is not there.
    """

    fidelity: Fidelity = "measured"
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
        for field in ("resident_ranks", "threads_per_rank", "measured_steps", "traced_steps"):
            within(field, getattr(self, field), 1)
        within("warmup_steps", self.warmup_steps, 10)
        within("seed", self.seed, 0)
        if self.fidelity != "emulated" and self.resident_ranks != 1:
            raise ValueError(f"resident_ranks must be 1 unless emulated, got {self.resident_ranks} for {self.fidelity}")
        if self.fidelity == "dryrun" and self.device == "cpu":
            raise ValueError("device must be 'auto' or 'cuda' for dryrun cases, whose device is a GPU, got 'cpu'")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must lie between 0 and 1, got {self.learning_rate}")
        if not 0 < self.time_limit_s < LARGEST:
            raise ValueError(f"time_limit_s must be > 0 and finite, got {self.time_limit_s}")
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < LARGEST:
            raise ValueError(f"memory_limit_gib must be > 0 and finite, got {self.memory_limit_gib}")

    @property
    def total_steps(self) -> int:
        """Optimizer steps before the traced pass."""
        return self.warmup_steps + self.measured_steps


KEYS = (*(name for name in Job.__struct_fields__ if name != "implementation"), *Protocol.__struct_fields__)
"""The keys of a case in a suite: all fields but the job's implementation, which its code decides."""

_COUNTS = ("gpus", "seq_len", "global_batch", "microbatches")
_READ: dict[str, Callable[[str], object]] = {
    "model": model_name, "cluster": cluster_name,
    **{key: partial(read_as, parse_count, key) for key in _COUNTS},
    "memory_limit_gib": lambda text: read_as(parse_bytes, "memory_limit_gib", text) / GIB,
}  # fmt: skip
"""Fields that people write in several ways."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One run of one job.

    Raises:
        ValueError: job and protocol do not go together; the message names the field, its value and the rule.
    """

    job: Job
    protocol: Protocol = Protocol()

    def __post_init__(self) -> None:
        job, fidelity = self.job, self.protocol.fidelity
        if (fidelity == "measured") == bool(job.cluster):
            given = f"'{job.cluster}'" if job.cluster else "none"
            raise ValueError(
                "cluster must be given for emulated and dryrun cases and for no others, got fidelity "
                f"'{fidelity}' and cluster {given}"
            )
        within("resident_ranks", self.protocol.resident_ranks, 1, most=job.gpus)
        if fidelity == "emulated":
            for name in ("tp", "cp", "pp", "sequence_parallel"):
                if (size := getattr(job, name)) > 1 or size is True:
                    raise ValueError(
                        f"{name} must be {'false' if size is True else 1} for an emulated case, got "
                        f"{str(size).lower()}; use fidelity 'dryrun'"
                    )
        if (low := job.precision) in LOW_BYTES:
            raise ValueError(f"precision must be 'fp32' or 'bf16' for a case, got '{low}'; only plans know {low}")
        if job.ep > 1:
            raise ValueError(f"ep must be 1 for a case, got {job.ep}; only plans divide experts")
        if job.implementation != Implementation():
            raise ValueError("implementation must be the default for a case, whose code decides it")

    @classmethod
    def of(cls, *, where: str = "case", strict: bool = True, **fields: Any) -> Self:
        """The case with these fields of job and protocol; unless ``strict``, numbers may be given as text.

        Models and clusters may be called by any of their names, counts may be ``"8k"``, and the memory limit
        ``"80GiB"``.

        Raises:
            SpecError: a field is unknown or has an invalid value, with the rule and the value in one line.
        """
        check_keys(where, fields, KEYS)
        for field, read in _READ.items():
            if isinstance(given := fields.get(field), str):
                fields[field] = read(given)
        job = {key: value for key, value in fields.items() if key in Job.__struct_fields__}
        protocol = {key: value for key, value in fields.items() if key in Protocol.__struct_fields__}
        parts = convert(job, Job, where=where, strict=strict), convert(protocol, Protocol, where=where, strict=strict)
        try:
            return cls(job=parts[0], protocol=parts[1])
        except ValueError as error:
            raise SpecError(f"{where}: {error}") from None

    def changed(self, **fields: Any) -> Self:
        """This case with other values of some fields of job and protocol."""
        job = {key: value for key, value in fields.items() if key in Job.__struct_fields__}
        protocol = {key: value for key, value in fields.items() if key not in job}
        return type(self)(
            job=msgspec.structs.replace(self.job, **job), protocol=msgspec.structs.replace(self.protocol, **protocol)
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of job and protocol, by their names."""
        return {**msgspec.structs.asdict(self.job), **msgspec.structs.asdict(self.protocol)}

    @property
    def axes(self) -> tuple[str, ...]:
        """How this case departs from plain training, in words; empty for most."""
        words = [text for option in OPTIONS.values() if (text := option.text(self.job))]
        if self.protocol.fidelity != "measured":
            words.append(f"{spelled(self.protocol.fidelity)} on {self.job.cluster}")
        if self.protocol.resident_ranks > 1:
            words.append(f"{self.protocol.resident_ranks} ranks resident")
        return tuple(words)

    @property
    def name(self) -> str:
        """A short name, unique within a suite that varies only strategy, number of GPUs, model, batch and axes."""
        job = self.job
        plain = f"{job.strategy}-w{job.gpus}-{job.model}-b{job.global_batch}x{job.seq_len}"
        return "-".join([plain, *self.axes]).replace(" ", "-").replace("/", "_").replace(":", ".")

    @property
    def hash(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of the canonical JSON of all fields, by their first names and
        defaults included; newer fields only if set, so that old hashes stay valid.
        """
        defaults = {f.name: f.default for kind in (Job, Protocol) for f in msgspec.structs.fields(kind)}
        given = {
            FIRST_NAMES.get(name, name): value
            for name, value in self.fields.items()
            if name in _FIRST or value != defaults[name]
        }
        return hashlib.sha256(msgspec.json.encode(given, order="sorted")).hexdigest()[:12]

    @property
    def processes(self) -> int:
        """How many processes a launch of this case starts."""
        ranks = {"measured": self.job.gpus, "emulated": self.protocol.resident_ranks}
        return ranks.get(self.protocol.fidelity, 1)

    def as_dry_run(self, cluster: str) -> Self:
        """This measured case as a dry run on ``cluster``."""
        return self.changed(fidelity="dryrun", cluster=cluster_name(cluster))

    def reference(self) -> Self:
        """The same batches on one unsharded rank, which this case's losses must equal.

        It accumulates and recomputes nothing, and computes in fp32: none of it may change a loss, except for the
        rounding of bf16, so the proof covers them too. What is trained, and by which optimizer, is the same. No limit
        of memory holds for it. It is measured: no other fidelity has losses that mean anything.
        """
        job = self.job
        plain = Job(
            strategy=REFERENCE_STRATEGY, gpus=1, model=job.model, global_batch=job.global_batch, seq_len=job.seq_len,
            workload=job.workload, tuning=job.tuning, lora_rank=job.lora_rank, lora_targets=job.lora_targets,
            frozen=job.frozen, optimizer=job.optimizer,
        )  # fmt: skip
        measured = msgspec.structs.replace(self.protocol, memory_limit_gib=None, fidelity="measured", resident_ranks=1)
        return type(self)(job=plain, protocol=measured)


def check_keys(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Check keys of suites and options.

    Raises:
        SpecError: a key is unknown; the message names the nearest known one, or the key's name now.
    """
    for key in given:
        if key not in known:
            remedy = f"it is now '{now}'" if (now := _OTHER_NAMES.get(key)) in known else nearest(key, [*known])
            if key == "dp_shard":
                remedy = "leave it out: it is gpus / (dp_replicate * tp * cp * pp)"
            raise SpecError(f"{where} has the unknown key '{key}'; {remedy}")


def spelled(fidelity: Fidelity) -> str:
    """A fidelity as people read it.

    >>> spelled("dryrun"), spelled("measured")
    ('dry run', 'measured')
    """
    return "dry run" if fidelity == "dryrun" else fidelity
