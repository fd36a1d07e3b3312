"""What ``refshard plan`` is asked for, and the space of configurations that this spans."""

import re
from typing import Any, TypeVar, get_args

import msgspec

from refshard.engine.placement import MODES
from refshard.errors import SpecError
from refshard.plan.cost_models import COST_MODELS, find_cost_model
from refshard.plan.plan import VARIANTS, Failures
from refshard.plan.search import AUTO
from refshard.plan.space import ALL, Space
from refshard.specs.cluster import ClusterSpec
from refshard.specs.configuration import Precision, Schedule
from refshard.specs.hardware import ELEMENT_BYTES
from refshard.specs.model import ModelSpec
from refshard.specs.reading import within
from refshard.strategies.table import ROWS

PLANNED = ("ddp", "fsdp1", "fsdp2", "fsdp2-tuned", *(f"refshard-{mode}" for mode in MODES))
SEARCHED = ("ddp", "fsdp1", "fsdp2", "megatron", "refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
"""Strategies of a plan, and of one with ``--search``, unless some are named."""
LARGE_MODEL, TOKENS, LARGE_TOKENS = 100 * 10**9, 4 * 2**20, 16 * 2**20
"""Tokens of a step of ``--search`` where none are given, and those of a model of 100 B parameters and more: the batch
that Llama 3 405B was trained with in the end (Grattafiori et al., 2024)."""
UPSTREAM = "yafsdp"
"""The strategy whose name is also the end of one of the engine's."""
Word = TypeVar("Word", bound=str)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, as the command line has it.

    Lists are separated by commas; ``all`` is every size that can run. An axis that is None is 1, or ``all`` with
    ``search``; replicas are ``all`` in any case, and so are tensor parallelism and microbatches of a given batch.
    ``compiled`` is a list of ``no`` and ``yes``; None is ``no``.
    """

    model: str
    cluster: str
    nodes: str | None = None
    seq_len: int = 8192
    tokens_per_step: str | None = None
    search: bool = False
    strategies: str | None = None
    microbatch: str | None = None
    accumulate: int = 1
    checkpoint: str | None = None
    replicas: str | None = None
    tensor: str | None = None
    context: str | None = None
    pipeline: str | None = None
    interleave: str | None = None
    schedule: str | None = None
    expert: str | None = None
    dtype: str | None = None
    reduction: str = "fp32"
    compiled: str | None = None
    offload: bool = False
    price_usd: float = 2.5
    mtbf_hours: float = Failures().mtbf_hours
    top: int = 8
    dry_runs: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SpecError: one is out of range.
        """
        try:
            for field in ("seq_len", "accumulate", "top"):
                within(_option(field), getattr(self, field), 1)
            within(_option("dry_runs"), self.dry_runs or 0, 0)
        except ValueError as error:
            raise SpecError(f"{error}; give a number in this range") from None
        if not 0 <= self.price_usd < float("inf"):
            raise SpecError(
                f"--price must be >= 0 USD per GPU-hour, and finite, got {self.price_usd}; give such a number"
            )
        if not 0 < self.mtbf_hours < float("inf"):
            raise SpecError(f"--mtbf must be > 0 hours, and finite, got {self.mtbf_hours}; give such a number")


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def varied_fields(asked: Asked, cluster: ClusterSpec) -> tuple[str, ...]:
    """Those of :data:`VARIANTS` of which several values are asked for."""
    values = (_precisions(asked, cluster), _compiled(asked))
    return tuple(field for field, of_field in zip(VARIANTS, values) if len(of_field) > 1)


def space_of(asked: Asked, model: ModelSpec, cluster: ClusterSpec) -> Space:
    """What to search on the cluster.

    Raises:
        SpecError: a value is not known, or they do not fit each other.
    """
    axes: dict[str, Any] = {
        name: _axis(name, getattr(asked, name), searched=_searched(name, asked))
        for name in ("tensor", "context", "pipeline", "interleave", "expert", "replicas", "microbatch")
    }
    return Space(
        strategies=strategies_of(asked), world_sizes=(cluster.world_size,),
        global_batch=global_batch_of(asked, model, cluster),
        schedules=_schedules(asked), checkpointing=_checkpointing(asked), precisions=_precisions(asked, cluster),
        compiled=_compiled(asked), reduction=_known("reduction", asked.reduction, tuple(ELEMENT_BYTES)),
        offload=asked.offload, **axes,
    )  # fmt: skip


def sized(nodes: str | None, cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster with each number of nodes asked for, ascending: ``"1,2,4"``, or ``"64..2048"``, doubling.

    Raises:
        SpecError: it is neither.
    """
    if nodes is None:
        return [cluster]
    if doubled := re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})", nodes.strip()):
        count, most = int(doubled[1]), int(doubled[2])
        if not 1 <= count <= most:
            raise SpecError(f"nodes must ascend from 1 or more, got {nodes!r}; write, for example, 64..2048")
        counts = []
        while count <= most:
            counts.append(count)
            count *= 2
    else:
        counts = sorted(set(_numbers("nodes", nodes)))
    return [cluster.of_nodes(count) for count in counts]


def _numbers(name: str, given: str) -> list[int]:
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not words or any(not re.fullmatch(r"[1-9]\d{0,6}", word) for word in words):
        raise SpecError(f"{name} must be numbers from 1, separated by commas, got {given!r}; write, for example, 1,2,4")
    return [int(word) for word in words]


def _searched(name: str, asked: Asked) -> bool:
    """Whether an axis that is not given takes all sizes."""
    if asked.search or name == "replicas":
        return True
    return asked.tokens_per_step is not None and name in ("tensor", "microbatch")


def _axis(name: str, given: str | None, *, searched: bool) -> tuple[int, ...]:
    if given is None:
        return ALL if searched else (1,)
    return ALL if given.strip() == "all" else tuple(dict.fromkeys(_numbers(name, given)))


def global_batch_of(asked: Asked, model: ModelSpec, cluster: ClusterSpec) -> int:
    """Sequences of a step.

    Raises:
        SpecError: the tokens are no whole number of sequences.
    """
    if asked.tokens_per_step is None and not asked.search:
        microbatch = max(_axis("microbatch", asked.microbatch, searched=False))
        return cluster.world_size * max(microbatch, 1) * asked.accumulate
    if asked.tokens_per_step is None:
        tokens = LARGE_TOKENS if model.params >= LARGE_MODEL else TOKENS
    else:
        tokens = tokens_of(asked.tokens_per_step)
    sequences, rest = divmod(tokens, asked.seq_len)
    if rest or not sequences:
        raise SpecError(
            f"tokens-per-step must be a multiple of seq-len = {asked.seq_len:,}, got {tokens:,}; change either"
        )
    return sequences


def tokens_of(given: str) -> int:
    """A number of tokens, with K for 2^10 and M for 2^20.

    >>> tokens_of("4M"), tokens_of("512k"), tokens_of("1000")
    (4194304, 524288, 1000)

    Raises:
        SpecError: it is no such number.
    """
    found = re.fullmatch(r"([1-9]\d{0,11})([KM]?)", given.strip().upper())
    if not found:
        raise SpecError(f"tokens-per-step must be a number, with K for 2^10 or M for 2^20, got {given!r}; write 4M")
    return int(found[1]) * _FACTORS[found[2]]


def strategies_of(asked: Asked) -> tuple[str, ...]:
    """The strategies asked for.

    Raises:
        SpecError: one has no closed form, or does not exist.
    """
    if asked.strategies is None:
        return SEARCHED if asked.search else PLANNED
    names = _words(asked.strategies)
    if not names:
        raise SpecError(f"strategy: no name in {asked.strategies!r}; separate names by commas, or leave the option out")
    for name in names:
        if name in ROWS and name not in COST_MODELS:
            raise SpecError(f"strategy: {_without_form(name, asked)}")
        find_cost_model(name)
    return names


def _without_form(name: str, asked: Asked) -> str:
    """What a strategy is that refshard runs and has no closed form of, and what to do instead."""
    plain = name.removesuffix("-compiled")
    if plain in COST_MODELS:
        return f"'{name}' has no closed form of its own; plan {plain} with --compile yes"
    if ROWS[name].compiles:
        return f"'{name}' has no closed form and cannot be dry-run; measure it on GPUs: refshard run --strategy {name}"
    dry = f"refshard dryrun --cluster {asked.cluster} --model {asked.model} --strategy {name}"
    if name == UPSTREAM:
        return (
            f"'{name}' is upstream's package, which has no closed form; plan the engine's mode refshard-yafsdp, or, "
            f"where the package is installed, dry-run it: {dry}"
        )
    return f"'{name}' has no closed form; dry-run it: {dry}"


def _schedules(asked: Asked) -> tuple[Schedule, ...]:
    known: tuple[Schedule, ...] = get_args(Schedule)
    if asked.schedule is None:
        return known
    return tuple(_known("schedule", name, known) for name in _words(asked.schedule))


def _checkpointing(asked: Asked) -> tuple[str, ...]:
    if asked.checkpoint is None:
        return (AUTO, "selective") if asked.search else (AUTO,)
    names = _words(asked.checkpoint)
    for name in names:
        if not re.fullmatch(r"auto|none|selective|full|every-[1-9]\d{0,5}|[1-9]\d{0,5}", name):
            raise SpecError(
                "checkpoint must be auto, none, selective, full, every-K or a number of layers, separated by commas, "
                f"got '{name}'; choose one of them"
            )
    return names


def _precisions(asked: Asked, cluster: ClusterSpec) -> tuple[Precision, ...]:
    """The precisions asked for; else bf16 on an accelerator, fp32 on a CPU.

    Raises:
        SpecError: one does not exist, or the hardware's profile has no rate for it.
    """
    hardware, known = cluster.accelerator, get_args(Precision)
    given = asked.dtype if asked.dtype is not None else "bf16" if hardware.device == "cuda" else "fp32"
    chosen: tuple[Precision, ...] = tuple(_known("dtype", name, known) for name in _several("dtype", given))
    if unknown := next((name for name in chosen if name not in hardware.matmul), None):
        raise SpecError(
            f"dtype: the hardware profile has rates for {', '.join(hardware.matmul)}, got {unknown}; choose one of "
            "these, or add the rate"
        )
    return chosen


def _compiled(asked: Asked) -> tuple[bool, ...]:
    """Whether blocks are compiled: each value asked for, else not.

    Raises:
        SpecError: a word is neither no nor yes.
    """
    words = ("no",) if asked.compiled is None else _several("compile", asked.compiled)
    return tuple(_known("compile", word, ("no", "yes")) == "yes" for word in words)


def _words(given: str) -> tuple[str, ...]:
    """What commas separate, each once."""
    return tuple(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))


def _several(field: str, given: str) -> tuple[str, ...]:
    """The words of a list.

    Raises:
        SpecError: there are none.
    """
    if not (words := _words(given)):
        raise SpecError(f"{field}: no word in {given!r}; separate words by commas, or leave the option out")
    return words


def _known(field: str, given: str, known: tuple[Word, ...]) -> Word:
    for word in known:
        if word == given:
            return word
    raise SpecError(f"{field} must be {', '.join(known[:-1])} or {known[-1]}, got '{given}'; choose one of them")
