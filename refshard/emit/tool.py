"""What is emitted, what it is emitted from, and how the tools refuse a configuration and fill their templates."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec
from refshard.specs.job import Job
from refshard.specs.model import ModelSpec, check_llama, load_model

HEAD = "$HEAD_HOST"
"""Stands in commands for the first node's name, which no plan knows; the shell fills it in."""
PORT = 29500
WHOLE = ("single", "ddp")
"""Strategies that shard nothing, on one GPU and on several."""
TEMPLATES = Path(__file__).parent / "templates"
Rule = tuple[bool, str]
"""A condition, and the sentence that holds if it is true."""


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """Files by name, to be written to one folder, and the command that starts the training from there.

    ``version`` is the version of the tool that reads the files. ``notes`` are sentences on what the tool cannot
    express, or does in another way. ``extra_bytes`` is a rank's memory that it takes beyond the plan's, as a note says.
    """

    files: dict[str, str]
    command: str
    version: str
    notes: tuple[str, ...] = ()
    extra_bytes: float = 0.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and what the names of its model and cluster stand for. The names are also in comments."""

    job: Job
    model: ModelSpec
    cluster: ClusterSpec

    @property
    def used(self) -> ClusterSpec:
        """The nodes that the job fills.

        Raises:
            SpecError: it would fill the last node in part.
        """
        return self.cluster.of_world_size(self.job.gpus)

    @property
    def torchrun(self) -> str:
        """The launcher of all ranks, as on the command line of each node."""
        used = self.used
        if used.nodes == 1:
            return f"torchrun --standalone --nproc-per-node {used.ranks_per_node}"
        return (
            f"torchrun --nnodes {used.nodes} --nproc-per-node {used.ranks_per_node} "
            f"--rdzv-backend c10d --rdzv-endpoint {HEAD}:{PORT}"
        )

    @property
    def title(self) -> str:
        """The job in a line, for the head of a file."""
        used = self.used
        nodes = "1 node" if used.nodes == 1 else f"{used.nodes} nodes"
        ranks = "1 rank" if used.ranks_per_node == 1 else f"{used.ranks_per_node} ranks"
        return f"{self.job.model}, {self.job.strategy} on {nodes} of {ranks}"


def filled(template: str, setting: Setting, **more: object) -> str:
    """A template's text for a job. Templates call it ``setting``, the job ``one`` and the model ``model``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only --emit needs it

    templates = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    return templates.get_template(template).render(setting=setting, one=setting.job, model=setting.model, **more)


def applying(*rules: Rule) -> tuple[str, ...]:
    """The sentences with a true condition."""
    return tuple(sentence for holds, sentence in rules if holds)


def refuse(tool: str, *rules: Rule) -> None:
    """Refuse the job if a condition is true.

    Raises:
        SpecError: the sentence of the first one that is.
    """
    for sentence in applying(*rules):
        raise SpecError(f"{tool}: {sentence}")


def refuse_job(
    tool: str,
    setting: Setting,
    *,
    strategies: tuple[str, ...] = (),
    llama: tuple[str, ...] | None = None,
    experts: str | None = None,
    script: bool = False,
) -> None:
    """Refuse what the tool does not have: a strategy, divided experts (``experts`` is then the remedy), and a way to
    train part of the parameters or with another optimizer, unless that is up to the user's ``script``. With ``llama``,
    also models that differ from a Llama in other fields than these.

    Raises:
        SpecError: the job has some of them.
    """
    one, count = setting.job, setting.model.experts.count if setting.model.experts else 0
    refuse(
        tool,
        (
            bool(strategies) and one.strategy not in strategies,
            f"strategy must be one that it runs ({', '.join(strategies)}), got '{one.strategy}'; name one of these "
            "with --strategy, or emit for another tool",
        ),
        (
            one.ep > 1 and not count,
            f"ep must be 1 for {one.model}, which has no experts, got {one.ep}; plan with --ep 1",
        ),
        (
            one.ep > 1 and experts is not None,
            f"ep must be 1, as it cannot divide experts over ranks, got {one.ep}; plan with --ep 1{experts}",
        ),
        (
            count % one.ep > 0,
            f"ep must divide the {count} experts, got {one.ep}; change --ep",
        ),
        (
            one.tuning != "full" and not script,
            f"tuning must be 'full', got '{one.tuning}'; emit for accelerate or deepspeed, where your script has "
            "the adapters",
        ),
        (bool(one.frozen) and not script, f"frozen must be empty, got '{one.frozen}'; plan without --frozen"),
        (
            one.optimizer != "adamw" and not script,
            f"optimizer must be 'adamw', got '{one.optimizer}'; emit for accelerate or deepspeed, where your script "
            "makes the optimizer",
        ),
        (
            one.precision in ("mxfp8", "nvfp4") and tool != "megatron",
            f"precision must be 'bf16', 'fp8' or 'fp32', got '{one.precision}'; emit for megatron",
        ),
    )
    if llama is not None:
        remedy = "emit for accelerate or deepspeed, which take the model from your script"
        try:
            check_llama(setting.model, f"what is written for {tool}", llama, remedy=remedy)
        except SpecError as error:
            raise SpecError(f"{tool}: {error}") from None


def preset(model: ModelSpec, names: Iterable[str]) -> str | None:
    """The first of some presets that has the model's dimensions, however it scales RoPE; None if none has."""
    plain = partial(msgspec.structs.replace, source="", rope_theta=1.0, rope_scaling=None, norm_eps=1.0)
    return next((name for name in names if plain(load_model(name)) == plain(model)), None)


def above_one(setting: Setting, *fields: str, remedy: str) -> list[Rule]:
    """Rules against sizes above 1."""
    sizes = {field: getattr(setting.job, field) for field in fields}
    return [(size > 1, f"{field} must be 1, got {size}; {remedy}") for field, size in sizes.items()]


def unknown_checkpointing(setting: Setting, known: tuple[str, ...]) -> Rule:
    """The rule against policies that a tool does not have."""
    policy, allowed = setting.job.checkpointing, ", ".join(f"'{name}'" for name in known)
    remedy = f"plan with --checkpointing {','.join(known)}"
    return policy not in known, f"checkpointing must be one of {allowed}, got '{policy}'; {remedy}"


def uneven(setting: Setting) -> list[Rule]:
    """Rules against heads, layers and tokens that the axes do not divide."""
    one, model = setting.job, setting.model
    parts = one.tp * (2 * one.cp if one.cp > 1 else 1)
    split = ("tp * 2 * cp", "--tp or --cp") if one.cp > 1 else ("tp", "--tp")
    stages = ("pp * interleave", "--pp or --interleave")
    return [
        (value % divisor > 0, f"{sizes} must divide the {value} {whole}, got {divisor}; change {options}")
        for divisor, (sizes, options), value, whole in (
            (one.tp, ("tp", "--tp"), model.n_kv_heads, "key-value heads"),
            (one.pp * one.interleave, stages, model.n_layers, "layers"),
            (parts, split, one.seq_len, "tokens of a sequence"),
        )
    ]


def reduces(setting: Setting, tool: str, *, each: bool) -> Rule:
    """The note for a tool that reduces gradients after each microbatch, or once a step, where the plan does not."""
    one, times = setting.job, ("once a step", "after each microbatch")
    differs = one.gpus > 1 and one.microbatches > 1 and one.implementation.reduce_each != each
    return differs, f"{tool} reduces gradients {times[each]}; the plan reduces them {times[not each]}."


def tuned(setting: Setting) -> Rule:
    """The note on adapters and optimizers, which the user's script makes."""
    one = setting.job
    made = [f"adapters ({one.tuning}, rank {one.lora_rank}, {one.lora_targets})"] * (one.tuning != "full")
    made += [f"the frozen parts ({one.frozen})"] * bool(one.frozen)
    made += [f"the optimizer ({one.optimizer})"] * (one.optimizer != "adamw")
    return bool(made), f"As in the plan, your script makes {' and '.join(made)}."
