"""``refshard dryrun --model``: the command line that trains a model under one strategy, to be dry-run like a script."""

from collections.abc import Sequence
from typing import Any

import msgspec

from refshard.errors import SpecError, UnsupportedError
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.model import check_trainable, known_dimensions
from refshard.specs.reading import tokens
from refshard.strategies import check_case

PROGRAM = "refshard.measure.dry.train"


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What to train, as the command line has it. ``microbatch`` is in sequences a rank and step."""

    model: str
    strategy: str = "fsdp2"
    seq_len: int = 8192
    microbatch: int = 1
    precision: str = "bf16"
    checkpointing: str = "none"


def training_command(training: Training, cluster: str, gpus: int | None) -> tuple[tuple[str, ...], int]:
    """The words of the command that trains it on ``gpus`` GPUs, by default the whole cluster, and its tokens a step
    over all ranks.

    Raises:
        SpecError: the model, the cluster, the strategy or another value does not exist, or they do not go together.
    """
    ranks = load_cluster(cluster).world_size if gpus is None else gpus
    fields: dict[str, Any] = {
        "model": training.model, "strategy": training.strategy, "gpus": ranks, "seq_len": training.seq_len,
        "global_batch": training.microbatch * ranks, "precision": training.precision,
        "checkpointing": training.checkpointing, "fidelity": "dryrun", "cluster": cluster,
    }  # fmt: skip
    case = Case.of(where="dryrun", **fields)
    case = case.changed(global_batch=training.microbatch * case.job.data_ranks)
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
    left = [part for word in words for part in word.split("=", 1)]
    names = {f"--{name.replace('_', '-')}": name for name in Training.__struct_fields__}
    changes: dict[str, Any] = {}
    while left:
        option = left.pop(0)
        if option not in names or not left:
            raise SpecError(f"dryrun: with --model, {', '.join(names)} may vary, each with a value, got '{option}'")
        value, field = left.pop(0), names[option]
        changes[field] = tokens(option, value) if field in ("seq_len", "microbatch") else value
    return msgspec.structs.replace(training, **changes)
