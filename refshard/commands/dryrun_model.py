"""``refshard dryrun --model``: the command line that trains a model under one strategy, to be dry-run like a script."""

import msgspec

from refshard.errors import SpecError, UnsupportedError
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import load_cluster
from refshard.specs.model import check_trainable, known_dimensions
from refshard.specs.reading import convert
from refshard.strategies import check_case

PROGRAM = "refshard.measure.dry.train"


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What to train, as the command line has it. ``microbatch`` is in sequences a rank and step."""

    model: str
    strategy: str = "fsdp2"
    seq_len: int = 8192
    microbatch: int = 1
    dtype: str = "bf16"
    checkpoint: str = "none"


def training_command(training: Training, cluster: str, world_size: int | None) -> tuple[tuple[str, ...], int]:
    """The words of the command that trains it on ``world_size`` ranks, by default the whole cluster, and its tokens a
    step over all ranks.

    Raises:
        SpecError: the model, the cluster, the strategy or another value does not exist, or they do not go together.
    """
    ranks = load_cluster(cluster).world_size if world_size is None else world_size
    fields = {
        "model": training.model, "strategy": training.strategy, "world_size": ranks, "seq_len": training.seq_len,
        "global_batch": training.microbatch * ranks, "precision": training.dtype, "checkpointing": training.checkpoint,
        "fidelity": "dryrun", "cluster": cluster,
    }  # fmt: skip
    case = convert(fields, CaseSpec, where="dryrun")
    case = msgspec.structs.replace(case, global_batch=training.microbatch * case.data_ranks)
    try:
        check_case(case, cuda=True)
    except UnsupportedError as error:
        raise SpecError(f"strategy: {error}") from None
    if (model := known_dimensions(case.model)) is not None:
        check_trainable(model)
    else:
        from refshard.models.own import find_factory  # torch takes seconds to import

        find_factory(case.model)
    given = {name: getattr(case, name) for name in fields}
    return ("-m", PROGRAM, *(f"{name}={value}" for name, value in given.items())), case.global_batch * case.seq_len
