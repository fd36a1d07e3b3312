"""The strategies as rows: what each is, which axes of a case it supports, and what it needs to run.

Rows are here, and not attributes of the strategies' classes, because whoever plans, lists or completes a name reads
them without torch: the file of a strategy takes seconds to import, and needs the package that it wraps.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from refshard.resources import install_extra
from refshard.specs.case import Case
from refshard.specs.job import OPTIONS, WHOLE_MATRICES
from refshard.specs.model import is_factory

OWN_MODEL = "own model"
"""The axis of cases with a factory's model."""
PLAIN: frozenset[str] = frozenset({
    "inference", "microbatches", "checkpointing", "bf16", "adamw-8bit", "muon", "adafactor", "sgd",
})  # fmt: skip
ANY: frozenset[str] = PLAIN | {"lora", "qlora"}
SHARDED: frozenset[str] = ANY | {"offload", "dp_replicate"}
TUNABLE: frozenset[str] = frozenset({"comm_memory"})
OWN: frozenset[str] = frozenset({OWN_MODEL})
EVERY: frozenset[str] = SHARDED | TUNABLE | OWN | {"tp", "frozen"}
STAGED: frozenset[str] = frozenset({"pp", "schedule"})
COMPOSING: frozenset[str] = EVERY | STAGED | {"sequence_parallel", "cp"}

_TAKES: dict[str, tuple[str, ...]] = {
    "lora": ("peft",), "qlora": ("peft", "bitsandbytes"), "adamw-8bit": ("torchao",),
}  # fmt: skip
"""The packages of the extra ``peers`` that an axis needs under any strategy."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy: the class ``code`` (``"module.Class"``, in this package), called with ``arguments``.

    - ``packages``: import names, which the extra ``extra`` of refshard installs.
    - ``without_cuda``: what the peer said when it was run without a CUDA device; empty if it runs.
    - ``compiles``: its first step compiles, for seconds or minutes.
    - ``labels``: it writes into a trace which unit computes. For others the harness does, unless they compile.
    - ``by_block``: every block of the model is a unit, or holds some.
    - ``deferred``: it also takes a model on the meta device, and fills it after sharding.
    - ``why_not``: why the peer cannot support an axis.
    """

    code: str
    about: str
    axes: frozenset[str]
    arguments: Mapping[str, Any] = {}
    packages: tuple[str, ...] = ()
    extra: str = ""
    without_cuda: str = ""
    compiles: bool = False
    labels: bool = False
    by_block: bool = True
    deferred: bool = False
    why_not: dict[str, str] = {}

    def missing(self) -> str:
        """Which packages are not installed, and how to install them; empty if all are."""
        return _missing(self.packages, self.extra)

    def unavailable(self, *, cuda: bool) -> str:
        """Why it cannot run here at all; empty if it can."""
        if self.without_cuda and not cuda:
            return f"needs a CUDA device; without one it says: {self.without_cuda}"
        return self.missing()

    def lacks(self, case: Case) -> tuple[str, ...]:
        """The axes that ``case`` asks for and this strategy does not support."""
        return tuple(sorted(axes_of(case) - self.axes))

    def lacking(self, case: Case) -> str:
        """:meth:`lacks` as text, with the known reasons; empty if nothing is lacking."""
        found = self.lacks(case)
        reasons = "".join(f"; {axis}: {self.why_not[axis]}" for axis in found if axis in self.why_not)
        return ", ".join(found) + reasons


def not_dry_run(case: Case) -> str:
    """Why a case that GPUs could run cannot be dry-run; empty if it can."""
    job = case.job
    if (ROWS[job.strategy].compiles or job.optimizer == "adamw-8bit") and find_spec("triton") is None:
        return f"compiled code is dry-run only where triton is installed: {install_extra('compiled')}"
    if job.offload:
        return "offload is not dry-run: the optimizer steps on the host, which a dry run does not time"
    if job.comm_memory == "group":
        return "comm_memory 'group' is not dry-run: NCCL allocates it, in a pool that is not simulated"
    if job.comm_memory == "symmetric":
        return (
            "comm_memory 'symmetric' is not dry-run: its copy engines leave the GPU's multiprocessors to compute, and "
            "no hardware profile gives speeds for that"
        )
    return ""


def not_composed(case: Case) -> str:
    """Why the options of a case cannot be combined; empty if they can."""
    job = case.job
    if job.pp_ranks > 1:
        alone = {"tuning": "full", "offload": False, "comm_memory": "default"}
        for field, only in alone.items():
            if (given := getattr(case.job, field)) != only:
                return f"{field} must be {only!r} under a pipeline, got {given!r}; set pp = 1"
    if job.cp > 1 and job.tuning != "full":
        return f"tuning must be 'full' under context parallelism, got '{job.tuning}'; set cp = 1"
    if job.schedule == "zero-bubble" and job.checkpointing != "none":
        return (
            "checkpointing must be 'none' for schedule 'zero-bubble', which goes back through a layer twice and would "
            f"recompute it twice, got {job.checkpointing!r}; use schedule 'interleaved'"
        )
    return ""


def not_with_own(case: Case) -> str:
    """Why a case cannot have an option because its model is a factory's; empty if it can."""
    job = case.job
    if not is_factory(job.model):
        return ""
    of_llama = {
        "tuning": job.tuning != "full",
        "frozen": bool(job.frozen),
        "optimizer": job.optimizer == "muon",
        "tp": job.tp > 1,
        "cp": job.cp > 1,
        "pp": job.pp > 1,
        "checkpointing": job.checkpointing == "selective",
    }
    if field := next((name for name, asked_for in of_llama.items() if asked_for), None):
        return f"{field} = {getattr(case.job, field)!r} needs one of refshard's Llamas, got the factory '{job.model}'"
    return ""


def axes_unavailable(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of these axes that no strategy can have here, each with the reason."""
    found = ((axis, _missing(_TAKES.get(axis, ()), "peers")) for axis in axes)
    return tuple(f"{axis} {reason}" for axis, reason in found if reason)


def _missing(packages: tuple[str, ...], extra: str) -> str:
    absent = [package for package in packages if find_spec(package) is None]
    if not absent:
        return ""
    remedy = install_extra(extra) if extra else "it is not on PyPI: install it from source"
    return f"needs {', '.join(absent)}, which is not installed; {remedy}"


def axes_of(case: Case) -> frozenset[str]:
    """The options by which ``case`` is not plain training: names of :data:`~refshard.specs.job.OPTIONS`, and
    :data:`OWN_MODEL`.
    """
    own = {OWN_MODEL} if is_factory(case.job.model) else set[str]()
    return frozenset(name for name, option in OPTIONS.items() if option.text(case.job)) | own


DTENSORS: dict[str, str] = {
    "adafactor": "torch's Adafactor squares norms in place, which DTensor refuses of divided rows"
}
FLAT: dict[str, str] = {
    "muon": "each rank steps a 1-D part of a flattened matrix, and Muon needs matrices",
    "adafactor": "each rank steps a 1-D part of a flattened matrix, and Adafactor would keep whole averages of it",
}
UNEVEN: dict[str, str] = {"muon": "ranks have uneven parts of a matrix, and torch's DTensor operators need even ones"}
ONE: dict[str, str] = {"muon": "it takes one optimizer, and torch's Muon takes matrices alone"}
COMPILED: frozenset[str] = frozenset({"inference", "microbatches", "checkpointing", "bf16", "muon", "sgd"})


def _variants(code: str, rows: Mapping[str, tuple[str, Mapping[str, Any]]], **same: Any) -> dict[str, Row]:
    """Rows of one class by name: each an about, which continues that of the row before, and arguments."""
    return {name: Row(code=code, about=about, arguments=given, **same) for name, (about, given) in rows.items()}


ROWS: dict[str, Row] = {
    "single": Row(
        code="single.Single", about="one unsharded rank, the reference for all others", by_block=False,
        axes=ANY | OWN | {"frozen"},
    ),
    "ddp": Row(
        code="ddp.DDP", about="torch's DistributedDataParallel", by_block=False, deferred=True,
        axes=ANY | OWN | STAGED | {"cp", "frozen"},
    ),
    **_variants("fsdp1.FSDP1", {
        "fsdp1": ("torch's FullyShardedDataParallel, FULL_SHARD", {}),
        "fsdp1-post": ("... that prefetches after a unit's backward, not before it", {"prefetch": "BACKWARD_POST"}),
        "fsdp1-no-prefetch": ("... that does not prefetch in backward", {"prefetch": None}),
        "fsdp1-grad-op": ("... SHARD_GRAD_OP: parameters stay gathered until backward", {"sharding": "SHARD_GRAD_OP"}),
    }, axes=SHARDED - WHOLE_MATRICES | OWN, why_not=FLAT, deferred=True),
    "fsdp1-no-shard": Row(
        code="fsdp1.FSDP1", about="... NO_SHARD: everything replicated", axes=PLAIN | OWN, deferred=True,
        arguments={"sharding": "NO_SHARD"},
    ),
    **_variants("fsdp2.FSDP2", {
        "fsdp2": ("torch's fully_shard by its tutorial", {}),
        "fsdp2-prefetch2": ("... gathers issued two units ahead", {"prefetch": 2}),
        "fsdp2-reduce-group": ("... reduce-scatters in a process group of their own", {"reduce_group": True}),
        "fsdp2-reduce-buffers2": ("... two inputs of reduce-scatters in flight, not one", {"reduce_buffers": 2}),
    }, axes=COMPOSING - {"adafactor"}, why_not=DTENSORS, labels=True, deferred=True),
    **_variants("fsdp2_tuned.FSDP2Tuned", {
        "fsdp2-tuned": ("... with every public knob that helps", {}),
        "fsdp2-tuned-deep": (
            "... and gathers two units ahead, two inputs of reduce-scatters in flight",
            {"prefetch": 2, "reduce_buffers": 2},
        ),
    }, axes=SHARDED - {"adafactor"} | TUNABLE, why_not=DTENSORS, labels=True, deferred=True),
    **_variants("simplefsdp.SimpleFSDP", {
        "simplefsdp": ("SimpleFSDP: DTensors gathered where used, under torch.compile", {}),
        "simplefsdp-bucket": ("... collectives bucketed", {"bucketing": "automatic"}),
        "simplefsdp-bucket-reorder": (
            "... and reordered (no effect below two buckets of 2000 MiB)", {"bucketing": "automatic", "reorder": True},
        ),
        "simplefsdp-by-block": ("... bucketed by block, each one block early", {"bucketing": "by-block"}),
    }, axes=COMPILED, why_not=DTENSORS, compiles=True),
    **_variants("compiled.Compiled", {
        "fsdp2-compiled": ("torch's FSDP2, each block compiled", {"of": "fsdp2"}),
        "fsdp2-compiled-model": ("... the whole model compiled", {"of": "fsdp2", "whole": True}),
        "refshard-fsdp-compiled": ("this project's engine in mode fsdp, each block compiled", {"of": "refshard-fsdp"}),
        "refshard-yafsdp-compiled": ("... in mode yafsdp", {"of": "refshard-yafsdp"}),
        "refshard-yafsdp-compiled-model": ("... the whole model compiled", {"of": "refshard-yafsdp", "whole": True}),
    }, axes=COMPILED, compiles=True, labels=True, deferred=True),
    "accelerate": Row(
        code="accelerate_fsdp2.AccelerateFSDP2", about="Hugging Face Accelerate's FSDP2 plugin, transformers' Llama",
        axes=frozenset({"inference", "microbatches", "checkpointing", "bf16", "offload", "lora", "qlora"}),
        packages=("accelerate", "transformers"), extra="peers", labels=True,
    ),
    "hf-trainer": Row(
        code="hf_trainer.HFTrainer", about="transformers' Trainer with its own FSDP2 sharding",
        axes=frozenset({"microbatches", "checkpointing", "bf16", "lora", "qlora"}), why_not=ONE,
        packages=("accelerate", "transformers", "greenlet"), extra="peers", labels=True,
    ),
    **_variants("deepspeed_zero.DeepSpeedZero", {
        "deepspeed-zero1": ("DeepSpeed's ZeRO-1", {"stage": 1}),
        "deepspeed-zero2": ("... ZeRO-2: gradients too", {"stage": 2}),
        "deepspeed-zero3": ("... ZeRO-3: parameters too", {"stage": 3}),
    }, axes=frozenset({"inference", "microbatches", "checkpointing", "lora"}), why_not=FLAT,
        packages=("deepspeed",), extra="deepspeed"),
    "megatron-fsdp": Row(
        code="megatron_fsdp.MegatronFSDP", about="NVIDIA's Megatron-FSDP, blocks as units",
        axes=frozenset({"microbatches", "checkpointing", "bf16"}), why_not=UNEVEN,
        packages=("megatron_fsdp",), extra="megatron",
        without_cuda="AssertionError: Torch not compiled with CUDA enabled",
    ),
    "yafsdp": Row(
        code="yafsdp.YaFSDP", about="upstream's YaFSDP, fully_shard", packages=("ya_fsdp",), labels=True,
        axes=frozenset({"inference", "microbatches", "checkpointing", "bf16", "lora"}), why_not=UNEVEN,
    ),
    "tensor-parallel": Row(
        code="tensor_parallel.TensorParallel", about="torch's parallelize_module over all ranks", deferred=True,
        axes=PLAIN - {"adafactor"} | {"sequence_parallel"}, why_not=DTENSORS,
    ),
    "pipeline": Row(
        code="pipeline.Pipeline", about="torch's pipeline schedules, all ranks in one pipeline", by_block=False,
        axes=PLAIN - {"bf16"} | {"schedule"}, deferred=True,
    ),
    "refshard-replicate": Row(
        code="refshard.Refshard", about="this project's engine, nothing sharded", arguments={"mode": "replicate"},
        axes=EVERY - {"dp_replicate"}, labels=True, deferred=True,
    ),
    **_variants("refshard.Refshard", {
        "refshard-zero1": ("... optimizer state sharded", {"mode": "zero1"}),
        "refshard-zero2": ("... gradients too, parameters between steps", {"mode": "zero2"}),
        "refshard-fsdp": ("... parameters gathered for each use", {"mode": "fsdp"}),
        "refshard-yafsdp": ("... into a ring of two buffers", {"mode": "yafsdp"}),
        "refshard-yafsdp-kept": (
            "... with all buffers kept from step to step: more memory, less waiting",
            {"mode": "yafsdp", "keep_buffers": True},
        ),
    }, axes=EVERY, labels=True, deferred=True),
}  # fmt: skip
"""Every strategy by name; the about of a variant continues that of the row before."""
