"""What is emitted, what it is emitted from, and how the tools refuse a configuration and fill their templates."""

from pathlib import Path

import msgspec

from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec
from refshard.specs.configuration import Configuration
from refshard.specs.model import ModelSpec, check_llama

HEAD = "$HEAD_HOST"
"""Stands in commands for the first node's name, which no plan knows; the shell fills it in."""
PORT = 29500
TEMPLATES = Path(__file__).parent / "templates"
Rule = tuple[bool, str]
"""A condition, and the sentence that holds if it is true."""


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """Files by name, to be written to one folder, and the command that starts the training from there.

    ``version`` is the version of the tool that reads the files. ``notes`` are sentences on what the tool cannot
    express, or does in another way.
    """

    files: dict[str, str]
    command: str
    version: str
    notes: tuple[str, ...] = ()


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of a model on a cluster, and the number of tokens of a sequence.

    ``model_name`` and ``cluster_name`` are the names under which refshard knows both; the model's is also in comments.
    """

    configuration: Configuration
    model: ModelSpec
    model_name: str
    cluster: ClusterSpec
    cluster_name: str
    seq_len: int

    @property
    def used(self) -> ClusterSpec:
        """The nodes that the configuration fills.

        Raises:
            SpecError: it would fill the last node in part.
        """
        return self.cluster.of_world_size(self.configuration.world_size)

    @property
    def torchrun(self) -> str:
        """The launcher of all ranks, for the command line of each node."""
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
        return f"{self.model_name}, {self.configuration.strategy} on {nodes} of {used.ranks_per_node} ranks"


def filled(template: str, job: Job, **more: object) -> str:
    """A template's text for a job. Templates call the configuration ``one``, and the model ``model``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only --emit needs it

    templates = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    return templates.get_template(template).render(job=job, one=job.configuration, model=job.model, **more)


def applying(*rules: Rule) -> tuple[str, ...]:
    """The sentences whose condition is true."""
    return tuple(sentence for holds, sentence in rules if holds)


def refuse(tool: str, *rules: Rule) -> None:
    """Refuse the job if a condition is true.

    Raises:
        SpecError: the sentence of the first one that is.
    """
    for sentence in applying(*rules):
        raise SpecError(f"{tool}: {sentence}")


def refuse_job(tool: str, job: Job, *, strategies: tuple[str, ...] = (), llama: tuple[str, ...] | None = None) -> None:
    """Refuse strategies that the tool does not have, divided experts, which no template writes, and, with ``llama``,
    models that differ from a Llama in other fields than these.

    Raises:
        SpecError: it is such a job.
    """
    one, experts = job.configuration, f"{job.model.experts.count} experts" if job.model.experts else "no experts"
    refuse(
        tool,
        (
            bool(strategies) and one.strategy not in strategies,
            f"strategy must be one that it runs ({', '.join(strategies)}), got '{one.strategy}'; name one of these "
            "with --strategy, or emit for another tool",
        ),
        (
            one.expert > 1,
            f"expert must be 1 for {job.model_name}, which has {experts}, got {one.expert}; plan with --expert 1",
        ),
    )
    if llama is not None:
        remedy = "emit for accelerate or deepspeed, which take the model from your script"
        try:
            check_llama(job.model, f"what is written for {tool}", llama, remedy=remedy)
        except SpecError as error:
            raise SpecError(f"{tool}: {error}") from None


def above_one(job: Job, *fields: str, remedy: str) -> list[Rule]:
    """Rules against sizes above 1."""
    sizes = {field: getattr(job.configuration, field) for field in fields}
    return [(size > 1, f"{field} must be 1, got {size}; {remedy}") for field, size in sizes.items()]


def unknown_checkpointing(job: Job, known: tuple[str, ...]) -> Rule:
    """The rule against policies that a tool does not have."""
    policy, allowed = job.configuration.checkpointing, ", ".join(f"'{name}'" for name in known)
    remedy = f"plan with --checkpoint {','.join(known)}"
    return policy not in known, f"checkpointing must be one of {allowed}, got '{policy}'; {remedy}"


def uneven(job: Job) -> list[Rule]:
    """Rules against heads, layers and tokens that the axes do not divide."""
    one, model = job.configuration, job.model
    parts = one.tensor * (2 * one.context if one.context > 1 else 1)
    split = ("tensor * 2 * context", "--tensor or --context") if one.context > 1 else ("tensor", "--tensor")
    stages = ("pipeline * interleave", "--pipeline or --interleave")
    return [
        (value % divisor > 0, f"{sizes} must divide the {value} {whole}, got {divisor}; change {options}")
        for divisor, (sizes, options), value, whole in (
            (one.tensor, ("tensor", "--tensor"), model.n_kv_heads, "key-value heads"),
            (one.pipeline * one.interleave, stages, model.n_layers, "layers"),
            (parts, split, job.seq_len, "tokens of a sequence"),
        )
    ]


def reduces(job: Job, tool: str, *, each: bool) -> Rule:
    """The note for a tool that reduces gradients after each microbatch, or once a step, where the plan does not."""
    one, times = job.configuration, ("once a step", "after each microbatch")
    differs = one.microbatches > 1 and one.reduce_each != each
    return differs, f"{tool} reduces gradients {times[each]}; the plan reduces them {times[not each]}."
