"""``refshard dryrun --model``: the command line that trains a model under one strategy, to be dry-run like a script."""

from collections.abc import Sequence
from typing import Any

import msgspec

from refshard.errors import SpecError, UnsupportedError
from refshard.quantities import parse_count
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.model import check_trainable, known_dimensions
from refshard.specs.reading import read_as
from refshard.strategies import check_case

PROGRAM = "refshard.measure.dry.train"
OPTIONS_OF_MODEL = frozenset(
    ("--strategy", "--seq-len", "--microbatch", "--microbatches", "--precision", "--checkpointing", "--set")
)
"""Options that describe the training of a model; a script has options of its own."""


_COUNTS = ("seq_len", "microbatch", "microbatches")


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What to train, as the command line has it: ``microbatch`` is sequences per rank and microbatch, and ``set`` other
    keys of a case, as ``key=value``.
    """

    model: str
    strategy: str = "fsdp2"
    seq_len: int = 8192
    microbatch: int = 1
    microbatches: int = 1
    precision: str = "bf16"
    checkpointing: str = "none"
    set: tuple[str, ...] = ()


def training_command(training: Training, cluster: str, gpus: int | None) -> tuple[tuple[str, ...], int]:
    """The words of the command that trains it on ``gpus`` GPUs, by default the whole cluster, and its tokens a step
    over all ranks.

    Raises:
        SpecError: the model, the cluster, the strategy or another value does not exist, or they do not go together.
    """
    ranks = load_cluster(cluster).world_size if gpus is None else gpus
    fields: dict[str, Any] = {
        "model": training.model, "strategy": training.strategy, "gpus": ranks, "seq_len": training.seq_len,
        "global_batch": training.microbatch * training.microbatches * ranks, "microbatches": training.microbatches,
        "precision": training.precision, "checkpointing": training.checkpointing, "fidelity": "dryrun",
        "cluster": cluster,
    }  # fmt: skip
    for change in training.set:
        key, equals, value = change.partition("=")
        if not equals or key in fields:
            remedy = f"use --{key.replace('_', '-')}" if equals else "write key=value, such as tp=2"
            raise SpecError(f"dryrun: set: '{change}' given; {remedy}")
        fields[key] = value
    case = Case.of(where="dryrun", strict=False, **fields)
    case = case.changed(global_batch=training.microbatch * training.microbatches * case.job.data_ranks)
    try:
        check_case(case, cuda=True)
    except UnsupportedError as error:
        raise SpecError(f"strategy: {error}") from None
    if (model := known_dimensions(case.job.model)) is not None:
        check_trainable(model)
    else:
        from refshard.models.own import find_factory  # torch takes seconds to import

        find_factory(case.job.model)
    words = ("-m", PROGRAM, *(f"{name}={case.fields[name]}" for name in fields))
    return words, case.job.global_batch * case.job.seq_len


def changed(training: Training, words: Sequence[str]) -> Training:
    """With the options that ``words`` give: ``--microbatch 2``, ``--checkpointing=full``.

    Raises:
        SpecError: they are no options of a model, or a value is no number.
    """
    left = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    names = {f"--{name.replace('_', '-')}": name for name in Training.__struct_fields__}
    changes: dict[str, Any] = {}
    while left:
        option = left.pop(0)
        if option not in names or not left:
            raise SpecError(f"dryrun: with --model, {', '.join(names)} may vary, each with a value, got '{option}'")
        value, field = left.pop(0), names[option]
        if field == "set":
            changes[field] = (*changes.get(field, training.set), value)
        else:
            changes[field] = read_as(parse_count, option, value) if field in _COUNTS else value
    return msgspec.structs.replace(training, **changes)
