"""A dry run's request and result, which its two processes exchange."""

from math import inf
from typing import Any, Literal

import msgspec

from refshard.errors import SpecError
from refshard.specs.cluster import cluster_name, load_cluster
from refshard.specs.reading import within

Outcome = Literal["stepped", "ended", "oom", "failed"]
"""How the script went: it took the steps or came to the end of the phase, ended before it had, ran out of the GPU's
memory, or raised.
"""
HeldUntil = Literal["", "gpu", "host"]
"""Until when memory that ``record_stream()`` holds back counts as held: until the GPU is done with it by the replay, or
until the host has waited, an upper bound. Empty if none is held back.
"""
UNLIMITED_BYTES = 2**50
"""The memory of a GPU without a limit."""
WORST = "worst"
_ROUTINGS = "balanced, zipf:S (the exponent S > 0, such as zipf:1.2) or worst"


def read_routing(text: str) -> tuple[str, float]:
    """The rule of a ``--routing``, and its exponent (0 if it has none).

    >>> read_routing("zipf:1.2")
    ('zipf', 1.2)

    Raises:
        ValueError: it is none.
    """
    rule, _, exponent = text.partition(":")
    try:
        read = rule, float(exponent or 0)
    except ValueError:
        read = "", 0.0
    if read not in (("balanced", 0), (WORST, 0)) and not (rule == "zipf" and 0 < read[1] < inf):
        raise ValueError(f"routing must be {_ROUTINGS}, got '{text}'")
    return read


def read_until(text: str) -> tuple[str, int]:
    """The phase of an ``--until-phase``, and which of its occurrences.

    >>> read_until("evaluate"), read_until("evaluate:2"), read_until("FSDP::all_gather")
    (('evaluate', 1), ('evaluate', 2), ('FSDP::all_gather', 1))

    Raises:
        ValueError: it names none.
    """
    name, _, number = text.rpartition(":")
    found = (name, int(number)) if number.isdecimal() else (text, 1)
    if not found[0].strip() or found[1] < 1:
        raise ValueError(f"until-phase must be a phase, or one and its occurrence (evaluate:2), got '{text}'")
    return found


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a script, on a cluster.

    ``command`` is the script's command line: ``[script.py, *arguments]``, or with ``module`` ``[package.module,
    *arguments]``. ``local_ranks`` GPUs are on each node. With ``until_stable`` it stops earlier than after ``steps``,
    once its peak is stable. Unless ``limited``, a GPU's memory has no end. ``environment`` is added to the script's
    environment variables before the device is made, and with ``rank_variables`` what torchrun sets for a rank.
    ``routing`` is how choices from values that are not computed are assumed to fall. At worst, they fall on the first
    experts of the rank ``expert_rank[0]``, of ``expert_rank[1]`` that experts are spread over. With ``sites`` or phases
    the recording has the line of each allocation. ``python`` runs the script, this process's if it is empty. ``phases``
    are names of ranges that the script annotates. It stops after ``until_phase``, or after ``steps`` if that is
    earlier.
    """

    command: tuple[str, ...]
    module: bool = False
    cluster: str
    world_size: int
    local_ranks: int
    rank: int = 0
    steps: int = 3
    until_stable: bool = False
    limited: bool = True
    environment: dict[str, str] = {}
    rank_variables: bool = True
    routing: str = "balanced"
    expert_rank: tuple[int, int] = (0, 1)
    sites: bool = False
    phases: tuple[str, ...] = ()
    until_phase: str | None = None
    python: str = ""

    def __post_init__(self) -> None:
        read_routing(self.routing)
        if not all(name.strip() for name in self.watched):
            raise ValueError(f"phases must be names, as in generate,train, got '{','.join(self.phases)}'")
        within("steps", self.steps, 1)
        within("world_size", self.world_size, 1)
        within("rank", self.rank, 0, most=self.world_size - 1)

    @property
    def until(self) -> tuple[str, int] | None:
        """The phase that ends the run, and which of its occurrences."""
        return None if self.until_phase is None else read_until(self.until_phase)

    @property
    def watched(self) -> tuple[str, ...]:
        """All phases that are named, each once."""
        return tuple(dict.fromkeys((*self.phases, *(self.until or ())[:1])))


def request_on(cluster: str, gpus: int | None, **given: Any) -> Request:
    """A request on ``gpus`` GPUs of a cluster, by default all; ``given`` are its other fields.

    Raises:
        SpecError: there is no such cluster, it has no such part, or a field breaks a rule.
    """
    whole = load_cluster(cluster)
    part = whole if gpus is None else whole.of_world_size(gpus)
    try:
        return Request(
            cluster=cluster_name(cluster), world_size=part.world_size, local_ranks=part.ranks_per_node, **given
        )
    except ValueError as error:
        raise SpecError(f"dryrun: {error}") from None


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the caching allocator, as ``torch.cuda.memory_stats`` names them."""

    allocated: int
    active: int
    reserved: int
    requested: int


class OtherSegments(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of ``reserved`` bytes with the other setting of ``expandable_segments``. Where the run would not have
    ``fit`` with it, those without a memory limit.
    """

    expandable: bool
    reserved: int
    fits: bool


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the script, and what happened there ``count`` times for one reason."""

    line: str
    reason: str
    count: int


class Compilation(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile made: ``graphs``, where it had to end one (``breaks``), and what it compiled again."""

    graphs: int
    breaks: tuple[Place, ...] = ()
    recompiled: tuple[Place, ...] = ()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """An operator chose ``count`` of ``among`` places, in ``module``, ``times`` in all, from values that nobody has."""

    operator: str
    module: str
    count: int
    among: int
    times: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the script's process reports; its events are in the recording next to it.

    ``error`` is the first line of what it raised, ``where`` the line of the script that raised it, ``blamed`` the line
    that read a value which was not computed, if that is probably why it raised. ``tokens`` are those that the outermost
    module was given in training, summed over all steps; 0 where it was given none; ``batches`` are their different
    shapes, (sequences, tokens). ``sharing`` ranks
    were given the same (tensor, context and pipeline parallelism). ``parameters`` counts the model's elements,
    unsharded. If it ran out of memory, ``allocations`` were served before. ``peak`` and ``now`` are of the GPU that
    held most; ``others`` are peaks of reserved bytes of other GPUs that the process used.
    ``retries`` counts how often the allocator gave its cache back to serve a request. ``managed_bytes`` are those of
    paged optimizer state, which no allocator of torch's sees.

    Where memory is ``held_until`` the GPU is done, ``peak``, ``now``, ``retries`` and the recording are those of a GPU,
    and ``peak_as_run`` is what the script's process saw. ``doubt`` says why it is held until the host has waited.
    ``other_segments`` is None if the allocator's calls cannot be repeated. ``choices`` were made by the request's
    assumption; ``chosen_sizes`` if modules made some, and the host read what follows from one, so that sizes may depend
    on it. ``expert_rank`` is this rank in the group that exchanged such values first, and its size. ``compiled`` says
    what torch.compile did, None where nothing was compiled. ``limited`` is the answer within the GPU's memory, whether
    the script's process had a limit or not. If it is out of memory, all else describes a run without a limit. If
    phases were asked for, ``ranges`` are the names that the script annotates with, up to a hundred.
    """

    outcome: Outcome
    error: str = ""
    where: str = ""
    blamed: str = ""
    steps_taken: int = 0
    tokens: int = 0
    batches: tuple[tuple[int, int], ...] = ()
    parameters: int = 0
    sharing: int = 1
    world_size: int = 1
    allocations: int = 0
    peak: Pool
    now: Pool
    others: dict[int, int] = {}
    retries: int = 0
    host_peak_bytes: int = 0
    managed_bytes: int = 0
    wall_s: float = 0.0
    torch: str = ""
    held_until: HeldUntil = ""
    doubt: str = ""
    peak_as_run: Pool | None = None
    other_segments: OtherSegments | None = None
    limited: "Answer | None" = None
    compiled: Compilation | None = None
    choices: tuple[Choice, ...] = ()
    chosen_sizes: bool = False
    expert_rank: tuple[int, int] = (0, 1)
    ranges: tuple[str, ...] = ()
