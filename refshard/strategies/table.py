"""The strategies as rows: what each is, which axes of a case it has, and what it needs to run. Imports no torch."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from refshard.engine.placement import MODES
from refshard.resources import install_extra
from refshard.specs.case import CaseSpec
from refshard.specs.model import is_factory

Axis = Literal[
    "inference", "microbatches", "checkpointing", "bf16", "lora", "qlora", "adamw-8bit", "muon", "offload",
    "replicas", "tensor parallel", "sequence parallel", "context parallel", "pipeline", "schedule", "comm memory",
    "own model",
]  # fmt: skip
"""What a case may ask for beside plain training."""
PLAIN: frozenset[Axis] = frozenset({"inference", "microbatches", "checkpointing", "bf16", "adamw-8bit", "muon"})
ANY: frozenset[Axis] = PLAIN | {"lora", "qlora"}
SHARDED: frozenset[Axis] = ANY | {"offload", "replicas"}
COMPOSED: frozenset[Axis] = SHARDED | {"tensor parallel"}
TUNABLE: frozenset[Axis] = frozenset({"comm memory"})
OWN: frozenset[Axis] = frozenset({"own model"})
EVERY: frozenset[Axis] = COMPOSED | TUNABLE | OWN
STAGED: frozenset[Axis] = frozenset({"pipeline", "schedule"})
COMPOSING: frozenset[Axis] = EVERY | STAGED | {"sequence parallel", "context parallel"}

_TAKES: dict[Axis, tuple[str, ...]] = {
    "lora": ("peft",), "qlora": ("peft", "bitsandbytes"), "adamw-8bit": ("torchao",),
}  # fmt: skip
"""The packages of the extra ``peers`` that an axis takes, under whatever strategy."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy: class ``class_name`` of the module ``module`` of this package, called with ``arguments``.

    ``packages`` are import names, which the extra ``extra`` of refshard installs. ``without_cuda`` is what the peer
    said when it was made to run without a CUDA device; empty where it runs. One that ``compiles`` does so in its first
    step, for seconds or minutes. One that ``labels`` writes into a trace which unit computes; of others the harness
    does, unless they compile. Every block of the model is a unit ``by_block``, or holds some. One that is ``deferred``
    takes a model on the meta device too, and fills it once it is sharded. ``why_not`` says why the peer cannot have an
    axis, where it cannot.
    """

    module: str
    class_name: str
    about: str
    axes: frozenset[Axis]
    arguments: dict[str, Any] = {}
    packages: tuple[str, ...] = ()
    extra: str = ""
    without_cuda: str = ""
    compiles: bool = False
    labels: bool = False
    by_block: bool = True
    deferred: bool = False
    why_not: dict[Axis, str] = {}

    def missing(self) -> str:
        """Which packages must be installed, and how, in words; empty if there are none."""
        return _missing(self.packages, self.extra)

    def unavailable(self, *, cuda: bool) -> str:
        """Why it cannot run here at all, in words; empty if it can."""
        if self.without_cuda and not cuda:
            return f"needs a CUDA device; without one it says: {self.without_cuda}"
        return self.missing()

    def lacks(self, case: CaseSpec) -> tuple[Axis, ...]:
        """The axes that ``case`` asks for and this strategy does not have."""
        return tuple(sorted(asked(case) - self.axes))

    def lacking(self, case: CaseSpec) -> str:
        """What :meth:`lacks` finds, in words, with the reasons that are known; empty if it finds nothing."""
        found = self.lacks(case)
        reasons = "".join(f"; {axis}: {self.why_not[axis]}" for axis in found if axis in self.why_not)
        return ", ".join(found) + reasons


def not_dry_run(case: CaseSpec) -> str:
    """Why a case cannot be dry-run, though it could be measured on GPUs, in words; empty if it can."""
    if ROWS[case.strategy].compiles:
        return "compiled cases are not dry-run: torch.compile's kernels need a real GPU"
    if case.optimizer == "adamw-8bit":
        return "adamw-8bit is not dry-run: torchao compiles its step, which needs a real GPU"
    if case.offload:
        return "offload is not dry-run: the optimizer steps on the host, which a dry run does not time"
    if case.comm_memory == "group":
        return "comm_memory 'group' is not dry-run: NCCL allocates it, in a pool that is not simulated"
    if case.comm_memory == "symmetric":
        return (
            "comm_memory 'symmetric' is not dry-run: its copy engines leave the GPU's multiprocessors to compute, and "
            "no hardware profile gives speeds for that"
        )
    return ""


def not_composed(case: CaseSpec) -> str:
    """Why the axes that a case asks for cannot be had together, in words; empty if they can."""
    if case.pipeline_ranks > 1:
        alone = {"tuning": "full", "offload": False, "comm_memory": "default"}
        for field, only in alone.items():
            if (given := getattr(case, field)) != only:
                return f"{field} must be {only!r} under a pipeline, got {given!r}; set pipeline_parallel = 1"
    if case.context_parallel > 1 and case.tuning != "full":
        return f"tuning must be 'full' under context parallelism, got '{case.tuning}'; set context_parallel = 1"
    if case.schedule == "zero-bubble" and case.checkpointing != "none":
        return (
            "checkpointing must be 'none' for schedule 'zero-bubble', which goes back through a layer twice and would "
            f"recompute it twice, got {case.checkpointing!r}; use schedule 'interleaved'"
        )
    return ""


def not_with_own(case: CaseSpec) -> str:
    """Why a case whose model is a factory's cannot have what it asks for, in words; empty if it can."""
    if not is_factory(case.model):
        return ""
    of_llama = {
        "tuning": case.tuning != "full",
        "optimizer": case.optimizer == "muon",
        "tensor_parallel": case.tensor_parallel > 1,
        "context_parallel": case.context_parallel > 1,
        "pipeline_parallel": case.pipeline_parallel > 1,
        "checkpointing": case.checkpointing == "selective",
    }
    if field := next((name for name, asked_for in of_llama.items() if asked_for), None):
        return f"{field} = {getattr(case, field)!r} needs one of refshard's Llamas, got the factory '{case.model}'"
    return ""


def axes_unavailable(axes: Iterable[Axis]) -> tuple[str, ...]:
    """Of these axes, those that no strategy can have here, each with why, in words."""
    found = ((axis, _missing(_TAKES.get(axis, ()), "peers")) for axis in axes)
    return tuple(f"{axis} {words}" for axis, words in found if words)


def _missing(packages: tuple[str, ...], extra: str) -> str:
    absent = [package for package in packages if find_spec(package) is None]
    if not absent:
        return ""
    remedy = install_extra(extra) if extra else "it is not on PyPI: install it from source"
    return f"needs {', '.join(absent)}, which is not installed; {remedy}"


def asked(case: CaseSpec) -> frozenset[Axis]:
    """The axes on which ``case`` is not plain training."""
    departs: dict[Axis, bool] = {
        "inference": case.workload == "inference",
        "microbatches": case.microbatches > 1,
        "checkpointing": case.checkpointing != "none",
        "bf16": case.precision == "bf16",
        "lora": case.tuning == "lora",
        "qlora": case.tuning == "qlora",
        "adamw-8bit": case.optimizer == "adamw-8bit",
        "muon": case.optimizer == "muon",
        "offload": case.offload,
        "replicas": case.replicas > 1,
        "tensor parallel": case.tensor_parallel > 1,
        "sequence parallel": case.sequence_parallel,
        "context parallel": case.context_parallel > 1,
        "pipeline": case.pipeline_parallel > 1,
        "schedule": case.schedule != "1f1b",
        "comm memory": case.comm_memory != "default",
        "own model": is_factory(case.model),
    }
    return frozenset(axis for axis, departing in departs.items() if departing)


FLAT: dict[Axis, str] = {"muon": "each rank steps a 1-D part of a flattened matrix, and Muon needs matrices"}
UNEVEN: dict[Axis, str] = {"muon": "ranks have uneven parts of a matrix, and torch's DTensor operators need even ones"}
ONE: dict[Axis, str] = {"muon": "it takes one optimizer, and torch's Muon takes matrices alone"}

ROWS: dict[str, Row] = {
    "single": Row(
        module="single", class_name="Single", about="one unsharded rank, the reference for all others",
        axes=ANY | OWN,
        by_block=False,
    ),
    "ddp": Row(
        module="ddp", class_name="DDP", about="torch's DistributedDataParallel", by_block=False,
        axes=ANY | OWN | STAGED | {"context parallel"},
        deferred=True,
    ),
    "fsdp1": Row(
        module="peers.fsdp1", class_name="FSDP1", about="torch's FullyShardedDataParallel, FULL_SHARD",
        axes=SHARDED - {"muon"} | OWN, why_not=FLAT, deferred=True,
    ),
    "fsdp1-post": Row(
        module="peers.fsdp1", class_name="FSDP1", about="... that prefetches after a unit's backward, not before it",
        axes=SHARDED - {"muon"} | OWN, why_not=FLAT, arguments={"prefetch": "BACKWARD_POST"}, deferred=True,
    ),
    "fsdp1-no-prefetch": Row(
        module="peers.fsdp1", class_name="FSDP1", about="... that does not prefetch in backward",
        axes=SHARDED - {"muon"} | OWN, why_not=FLAT, arguments={"prefetch": None}, deferred=True,
    ),
    "fsdp1-grad-op": Row(
        module="peers.fsdp1", class_name="FSDP1", about="... SHARD_GRAD_OP: parameters stay gathered until backward",
        axes=SHARDED - {"muon"} | OWN, why_not=FLAT, arguments={"sharding": "SHARD_GRAD_OP"}, deferred=True,
    ),
    "fsdp1-no-shard": Row(
        module="peers.fsdp1", class_name="FSDP1", about="... NO_SHARD: everything replicated", axes=PLAIN | OWN,
        arguments={"sharding": "NO_SHARD"}, deferred=True,
    ),
    "fsdp2": Row(
        module="fsdp2", class_name="FSDP2", about="torch's fully_shard by its tutorial", axes=COMPOSING,
        labels=True, deferred=True,
    ),
    **{
        name: Row(
            module="fsdp2", class_name="FSDP2", about=about, axes=COMPOSING, arguments=knobs, labels=True,
            deferred=True,
        )
        for name, about, knobs in (
            ("fsdp2-prefetch2", "... gathers issued two units ahead", {"prefetch": 2}),
            ("fsdp2-reduce-group", "... reduce-scatters in a process group of their own", {"reduce_group": True}),
            ("fsdp2-reduce-buffers2", "... two inputs of reduce-scatters in flight, not one", {"reduce_buffers": 2}),
        )
    },
    "fsdp2-tuned": Row(
        module="fsdp2_tuned", class_name="FSDP2Tuned", about="... with every public knob that helps",
        axes=SHARDED | TUNABLE, labels=True, deferred=True,
    ),
    "fsdp2-tuned-deep": Row(
        module="fsdp2_tuned", class_name="FSDP2Tuned", axes=SHARDED | TUNABLE, labels=True, deferred=True,
        about="... and gathers two units ahead, two inputs of reduce-scatters in flight",
        arguments={"prefetch": 2, "reduce_buffers": 2},
    ),
    **{
        name: Row(
            module="peers.simplefsdp", class_name="SimpleFSDP", about=about, arguments=knobs, compiles=True,
            axes=frozenset({"inference", "microbatches", "checkpointing", "bf16", "muon"}),
        )
        for name, about, knobs in (
            ("simplefsdp", "SimpleFSDP: DTensors gathered where used, under torch.compile", {}),
            ("simplefsdp-bucket", "... collectives bucketed", {"bucketing": "automatic"}),
            ("simplefsdp-bucket-reorder", "... and reordered (no effect below two buckets of 2000 MiB)",
             {"bucketing": "automatic", "reorder": True}),
            ("simplefsdp-by-block", "... bucketed by block, each one block early", {"bucketing": "by-block"}),
        )
    },
    **{
        f"{of}-compiled": Row(
            module="compiled_blocks", class_name="CompiledBlocks", about=about, arguments={"of": of}, compiles=True,
            labels=True, deferred=True, axes=frozenset({"inference", "microbatches", "checkpointing", "bf16", "muon"}),
        )
        for of, about in (
            ("fsdp2", "torch's FSDP2, each block compiled"),
            ("refshard-fsdp", "this project's engine in mode fsdp, each block compiled"),
            ("refshard-yafsdp", "... in mode yafsdp"),
        )
    },
    "accelerate": Row(
        module="peers.accelerate_fsdp2", class_name="AccelerateFSDP2", packages=("accelerate", "transformers"),
        extra="peers", about="Hugging Face Accelerate's FSDP2 plugin, transformers' Llama", labels=True,
        axes=frozenset({"inference", "microbatches", "checkpointing", "bf16", "offload", "lora", "qlora"}),
    ),
    "hf-trainer": Row(
        module="peers.hf_trainer", class_name="HFTrainer", packages=("accelerate", "transformers", "greenlet"),
        extra="peers", about="transformers' Trainer with its own FSDP2 sharding", labels=True,
        axes=frozenset({"microbatches", "checkpointing", "bf16", "lora", "qlora"}), why_not=ONE,
    ),
    **{
        f"deepspeed-zero{stage}": Row(
            module="peers.deepspeed_zero", class_name="DeepSpeedZero", arguments={"stage": stage},
            packages=("deepspeed",), extra="deepspeed", about=about, why_not=FLAT,
            axes=frozenset({"inference", "microbatches", "checkpointing", "lora"}),
        )
        for stage, about in (
            (1, "DeepSpeed's ZeRO-1"), (2, "... ZeRO-2: gradients too"), (3, "... ZeRO-3: parameters too"),
        )
    },
    "megatron-fsdp": Row(
        module="peers.megatron_fsdp", class_name="MegatronFSDP", packages=("megatron_fsdp",), extra="megatron",
        about="NVIDIA's Megatron-FSDP, blocks as units",
        axes=frozenset({"microbatches", "checkpointing", "bf16"}), why_not=UNEVEN,
        without_cuda="AssertionError: Torch not compiled with CUDA enabled",
    ),
    "yafsdp": Row(
        module="peers.yafsdp", class_name="YaFSDP", packages=("ya_fsdp",), about="upstream's YaFSDP, fully_shard",
        labels=True, why_not=UNEVEN,
        axes=frozenset({"inference", "microbatches", "checkpointing", "bf16", "lora"}),
    ),
    "tensor-parallel": Row(
        module="peers.tensor_parallel", class_name="TensorParallel", about="torch's parallelize_module over all ranks",
        axes=PLAIN | {"sequence parallel"}, deferred=True,
    ),
    "pipeline": Row(
        module="peers.pipeline", class_name="Pipeline", about="torch's pipeline schedules, all ranks in one pipeline",
        by_block=False, deferred=True,
        axes=frozenset({"inference", "microbatches", "checkpointing", "adamw-8bit", "muon", "schedule"}),
    ),
    **{
        f"refshard-{mode}": Row(
            module="refshard", class_name="Refshard", about=about, arguments={"mode": mode}, labels=True,
            axes=EVERY - ({"replicas"} if mode == "replicate" else set()), deferred=True,
        )
        for mode, about in {
            "replicate": "this project's engine, nothing sharded",
            "zero1": "... optimizer state sharded",
            "zero2": "... gradients too, parameters between steps",
            "fsdp": "... parameters gathered for each use",
            "yafsdp": "... into a ring of two buffers",
        }.items()
    },
    "refshard-yafsdp-kept": Row(
        module="refshard", class_name="Refshard", arguments={"mode": "yafsdp", "keep_buffers": True}, labels=True,
        about="... with all buffers kept from step to step: more memory, less waiting", axes=EVERY, deferred=True,
    ),
}  # fmt: skip
"""Every strategy by name; the about of a variant continues that of the row before."""

assert {f"refshard-{mode}" for mode in MODES} <= ROWS.keys()
