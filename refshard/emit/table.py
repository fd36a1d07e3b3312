"""The tools for which a configuration can be emitted."""

from collections.abc import Callable

import msgspec

from refshard.emit import accelerate, deepspeed, megatron, suite, torchtitan
from refshard.emit.tool import Emitted, Setting
from refshard.errors import SpecError, nearest
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.specs.job import Implementation

TOOLS: dict[str, Callable[[Setting], Emitted]] = {
    "torchtitan": torchtitan.emit,
    "accelerate": accelerate.emit,
    "megatron": megatron.emit,
    "deepspeed": deepspeed.emit,
    "refshard": suite.emit,
}

RUNS: dict[str, tuple[str, ...]] = {
    "torchtitan": torchtitan.STRATEGIES,
    "accelerate": accelerate.STRATEGIES,
    "megatron": megatron.STRATEGIES,
    "deepspeed": tuple(deepspeed.STAGES),
}
"""The data-parallel strategies that a tool has; one that is not listed has all."""

POLICIES: dict[str, tuple[str, ...]] = {
    "torchtitan": tuple(torchtitan.POLICIES),
    "accelerate": accelerate.POLICIES,
}
"""The checkpointing policies of tools that cannot checkpoint a number of layers; one that is not listed can."""

UNWRITTEN = ("fp8_attention", "fp8_head", "fused_experts", "graphs", "recomputes", "expert_tp", "stages")
"""Fields of the implementation that only closed forms know."""


def emit(tool: str, setting: Setting) -> Emitted:
    """The files and the command with which ``tool`` runs the job; on GPUs, torch's allocator has the plan's setting.

    Raises:
        SpecError: there is no such tool, or it cannot run the job.
    """
    if tool not in TOOLS:
        raise SpecError(f"emit: no tool '{tool}'; {nearest(tool, list(TOOLS))}")
    given, default = setting.job.implementation, Implementation()
    if unwritten := next((name for name in UNWRITTEN if getattr(given, name) != getattr(default, name)), None):
        raise SpecError(
            f"{unwritten}: no emitted configuration sets it, got {getattr(given, unwritten)!r}; leave it at its "
            "default, and set the tool's own option"
        )
    emitted = TOOLS[tool](setting)
    if setting.cluster.accelerator.device != "cuda":
        return emitted
    return msgspec.structs.replace(emitted, command=f"{EXPANDABLE_SEGMENTS} {emitted.command}")
