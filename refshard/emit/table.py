"""The tools for which a configuration can be emitted."""

from collections.abc import Callable

from refshard.emit import accelerate, deepspeed, megatron, suite, torchtitan
from refshard.emit.tool import Emitted, Setting
from refshard.errors import SpecError, nearest

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


def emit(tool: str, setting: Setting) -> Emitted:
    """The files and the command with which ``tool`` runs the job.

    Raises:
        SpecError: there is no such tool, or it cannot run the job.
    """
    if tool not in TOOLS:
        raise SpecError(f"emit: no tool '{tool}'; {nearest(tool, list(TOOLS))}")
    return TOOLS[tool](setting)
