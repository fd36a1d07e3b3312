"""What is emitted, and what it is emitted from."""

import msgspec

from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec
from refshard.specs.configuration import Configuration
from refshard.specs.model import ModelSpec, check_llama

HEAD = "$HEAD_HOST"
"""Stands in commands for the first node's name, which no plan knows; the shell fills it in."""
PORT = 29500


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """Files by name, to be written to one folder, and the command that starts the training from there.

    ``version`` is the version of the tool that reads the files. ``notes`` say what the tool cannot express, or does in
    another way, a sentence each.
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


def refuse_experts(tool: str, job: Job) -> None:
    """Check that no experts are divided: what is written says nothing of any.

    Raises:
        SpecError: they are.
    """
    if (expert := job.configuration.expert) > 1:
        experts = f"{job.model.experts.count} experts" if job.model.experts else "no experts"
        raise SpecError(
            f"{tool}: expert must be 1 for {job.model_name}, which has {experts}, got {expert}; plan with --expert 1"
        )


def refuse_beyond_llama(tool: str, job: Job, allowed: tuple[str, ...] = ()) -> None:
    """Check that the model is a Llama, except in fields that are ``allowed``: no other is written.

    Raises:
        SpecError: it is not, for example a mixture of experts.
    """
    remedy = "emit for accelerate or deepspeed, which take the model from your script"
    try:
        check_llama(job.model, f"what is written for {tool}", allowed, remedy=remedy)
    except SpecError as error:
        raise SpecError(f"{tool}: {error}") from None


def refuse_strategy(tool: str, job: Job, runs: tuple[str, ...]) -> None:
    """Check that ``tool`` has the strategy.

    Raises:
        SpecError: it does not.
    """
    if (strategy := job.configuration.strategy) not in runs:
        raise SpecError(
            f"{tool}: strategy must be one that it runs ({', '.join(runs)}), got '{strategy}'; name one "
            "of these with --strategy, or emit for another tool"
        )


def refuse_above_one(tool: str, job: Job, *fields: str, remedy: str) -> None:
    """Check that the named sizes are 1.

    Raises:
        SpecError: one is not.
    """
    for field in fields:
        if (size := getattr(job.configuration, field)) > 1:
            raise SpecError(f"{tool}: {field} must be 1, got {size}; {remedy}")


def refuse_checkpointing(tool: str, job: Job, can: tuple[str, ...]) -> None:
    """Check that ``tool`` has the policy.

    Raises:
        SpecError: it does not.
    """
    if (policy := job.configuration.checkpointing) not in can:
        allowed = ", ".join(f"'{name}'" for name in can)
        raise SpecError(
            f"{tool}: checkpointing must be one of {allowed}, got '{policy}'; plan with --checkpoint {','.join(can)}"
        )


def refuse_uneven(tool: str, job: Job) -> None:
    """Check that heads, layers and tokens can be divided as asked.

    Raises:
        SpecError: they cannot.
    """
    asked, model = job.configuration, job.model
    stages = asked.pipeline * asked.interleave
    parts = asked.tensor * (2 * asked.context if asked.context > 1 else 1)
    split = ("tensor * 2 * context", "--tensor or --context") if asked.context > 1 else ("tensor", "--tensor")
    for divisor, (sizes, options), value, whole in (
        (asked.tensor, ("tensor", "--tensor"), model.n_kv_heads, "key-value heads"),
        (stages, ("pipeline * interleave", "--pipeline or --interleave"), model.n_layers, "layers"),
        (parts, split, job.seq_len, "tokens of a sequence"),
    ):
        if value % divisor:
            raise SpecError(f"{tool}: {sizes} must divide the {value} {whole}, got {divisor}; change {options}")


def reduces_once(job: Job, tool: str) -> tuple[str, ...]:
    """The note for a tool that reduces gradients once a step."""
    if job.configuration.reduce_each and job.configuration.microbatches > 1:
        return (f"{tool} reduces gradients once a step; the plan reduces them after each microbatch.",)
    return ()


def reduces_each(job: Job, tool: str) -> tuple[str, ...]:
    """The note for a tool that reduces gradients after each microbatch."""
    if not job.configuration.reduce_each and job.configuration.microbatches > 1:
        return (f"{tool} reduces gradients after each microbatch; the plan reduces them once a step.",)
    return ()
