"""Attributes the time of a trace's steps: every nanosecond belongs to exactly one owner, a piece of work.

The description of a piece of work does not depend on compiler, library or GPU. A kernel's name would: it has its tile
size, template arguments and architecture. So the description is the operator that launched it, the operator's inputs,
the unit and the phase of the step. The difference of two traces is the sum of their owners' differences
(:mod:`refshard.analysis.difference`).
"""

import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import CLASSES, OperatorClass
from refshard.analysis.kineto import operation_of
from refshard.analysis.names import (
    SURE,
    class_of_kernel,
    class_of_operator,
    kernel_in_words,
    name_in_words,
    work_in_words,
)
from refshard.analysis.overlap import CAUSES, idle_gaps, knows_launches
from refshard.analysis.windows import bounds
from refshard.events.timeline import (
    KINDS,
    UNKNOWN,
    Intervals,
    Ints,
    Kind,
    Mask,
    Meaning,
    Nanoseconds,
    Rows,
    Spans,
    Timeline,
    grouped,
    sums,
)

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
_PHASES = (None, FORWARD, BACKWARD, OPTIMIZER)
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\{lambda[^{}]*\}")
_INNERMOST = re.compile(r"<[^<>]*>|\([^()]*\)|\[[^\[\]]*\]")
_ARCHITECTURE = re.compile(r"\b(?:sm_?\d+a?|volta|turing|ampere|ada|hopper|blackwell|maxwell|pascal|gfx\d+\w?)_")
_TILE = re.compile(r"_?(?:tile(?:size)?|warpsize|warpgroupsize|tensor|sliced|stages?|MT|MI|align)?\d+(?:x\d+)+", re.I)


_OF_A_LIBRARY = re.compile(r"_?(?:cudnn|miopen|mkldnn|flash|efficient)_(?=convolution|attention|batch_norm|rnn)")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a span does; None, or no text, where the trace does not tell or it does not apply.

    ``kind`` is one of :class:`Kind`, or ``idle`` for the time before such work; then ``bound`` is the cause.
    ``operator`` launched the span; if ``by_name``, nothing tells which, and it is the kernel's name without what
    changes with library and GPU. ``ordinal`` counts the calls of one operator in one unit, phase and step from 0.
    ``dims`` and ``dtype`` are an operator's inputs; ``bytes`` and ``group`` are of a collective.
    """

    kind: str
    operator: str
    unit: str | None = None
    phase: str | None = None
    dims: str = ""
    dtype: str = ""
    ordinal: int | None = None
    bytes: int | None = None
    group: str | None = None
    bound: str | None = None
    by_name: bool = False


def plain_name(kernel: str) -> str:
    """A kernel's name without its arguments, its template's, tile numbers and architecture.

    >>> plain_name("void at::native::vectorized_elementwise_kernel<4, F<float>, Array<char*, 3> >(int, F<float>)")
    'at::native::vectorized_elementwise_kernel'
    >>> plain_name("ampere_sgemm_128x64_nn"), plain_name("volta_sgemm_32x32_sliced1x4_nn")
    ('sgemm_nn', 'sgemm_nn')
    """
    if kernel.startswith(("Memcpy", "Memset")):
        return kernel
    name, before = _ANONYMOUS.sub("", kernel), ""
    while name != before:
        before, name = name, _INNERMOST.sub("", name)
    name = name.strip().rpartition(" ")[2]
    return _TILE.sub("", _ARCHITECTURE.sub("", name)).strip("_") or kernel


def family(operator: str) -> str:
    """What operators of several libraries have in common that do the same.

    >>> family("aten::cudnn_convolution") == family("aten::miopen_convolution")
    True
    """
    return _OF_A_LIBRARY.sub("", operator)


def works_of(timeline: Timeline) -> tuple[list[Work], Rows]:
    """The works of a timeline, and which of them each span does."""
    spans = timeline.spans
    if not len(spans):
        return [], np.empty(0, np.int64)
    names, what, by_name = _operators(spans)
    phases, units = phases_of(spans), spans.units.astype(np.int64)
    inputs = _column(spans.inputs, spans)
    ordinals = _ordinals(spans, what, phases)
    columns = (spans.kinds, what, by_name, units, phases, inputs, ordinals)
    firsts, codes = grouped(*columns)
    found = [
        Work(
            kind=KINDS[spans.kinds[row]].value, operator=names[what[row]],
            unit=None if units[row] < 0 else spans.unit_names[units[row]], phase=_PHASES[phases[row]],
            dims="" if inputs[row] < 0 else spans.input_names[inputs[row]].dims,
            dtype="" if inputs[row] < 0 else spans.input_names[inputs[row]].dtype,
            ordinal=None if ordinals[row] < 0 else int(ordinals[row]), by_name=bool(by_name[row]),
        )
        for row in firsts.tolist()
    ]  # fmt: skip
    places: dict[Work, int] = {}
    for one in timeline.collectives:
        if not one.rows:
            continue
        # What a sharded unit reduces are gradients, whichever thread runs it.
        reduces = one.unit is not None and one.op in ("reduce_scatter", "all_reduce")
        parts = (one.group, None if one.group_size is None else f"{one.group_size} ranks")
        work = Work(
            kind=Kind.COMM.value, operator=one.op, unit=one.unit,
            phase=BACKWARD if reduces else _PHASES[phases[one.rows[0]]], bytes=one.bytes,
            group=", ".join(part for part in parts if part) or None,
        )  # fmt: skip
        codes[list(one.rows)] = places.setdefault(work, len(found))
        if places[work] == len(found):
            found.append(work)
    return found, codes


def phases_of(spans: Spans) -> Rows:
    """The phase of each span, as a place in ``(None, FORWARD, BACKWARD, OPTIMIZER)``.

    Backward is what autograd's engine launched, what a unit's backward did, and what reduces gradients; optimizer, what
    its step did. Forward is what a unit's forward did, and all else that was launched before the step's last backward.
    """
    backward = spans.under & (Meaning.BACKWARD | Meaning.REDUCE) > 0
    if len(spans.in_autograd):
        backward = backward | spans.in_autograd
    last = np.full(int(spans.steps.max(initial=UNKNOWN)) + 2, UNKNOWN, np.int64)
    np.maximum.at(last, spans.steps[backward] + 1, spans.launches[backward])
    before = (spans.launches != UNKNOWN) & (spans.launches < last[spans.steps + 1])
    forward = (spans.under & Meaning.FORWARD > 0) | before
    optimizer = spans.under & Meaning.OPTIMIZER > 0
    return np.select((optimizer, backward, forward), (3, 2, 1), 0).astype(np.int64)


def _operators(spans: Spans) -> tuple[list[str], Rows, Mask]:
    """A table of names, which of them each span bears, and whether that is its kernel's for want of an operator."""
    unknown = (spans.operators == UNKNOWN) | (spans.operators == spans.names) & (_column(spans.calls, spans) == UNKNOWN)
    by_name = unknown | spans.of_kind(Kind.COMM)
    names = list(spans.name_table)
    place = {name: code for code, name in reversed(list(enumerate(names)))}
    plain = np.zeros(len(names), np.int64)
    for code in np.unique(spans.names[by_name]).tolist():
        name = plain_name(names[code])
        if name not in place:
            place[name] = len(names)
            names.append(name)
        plain[code] = place[name]
    return names, np.where(by_name, plain[spans.names], spans.operators).astype(np.int64), by_name


def meanings(spans: Spans) -> tuple[list[str], Rows]:
    """What spans do, in words, and which of these each does.

    Spans of one operator with the same inputs do the same; where these are unknown, those of one name.
    """
    inputs, is_comm, (_, _, by_name) = _column(spans.inputs, spans), spans.of_kind(Kind.COMM), _operators(spans)
    inputs[is_comm] = UNKNOWN
    firsts, codes = grouped(np.where(inputs == UNKNOWN, spans.names, spans.operators), inputs, is_comm)
    found = []
    for row in firsts.tolist():
        name, operator = spans.name_table[spans.names[row]], spans.operators[row]
        if is_comm[row]:
            found.append(operation_of(name))
        elif inputs[row] != UNKNOWN:
            given = spans.input_names[inputs[row]]
            found.append(work_in_words(spans.name_table[operator], given.dims, given.dtype))
        else:
            found.append(kernel_in_words(name) if by_name[row] else name_in_words(spans.name_table[operator]))
    return found, codes


def _column(column: Ints, spans: Spans) -> Rows:
    """A column that may be empty, where it tells nothing."""
    return np.full(len(spans), UNKNOWN, np.int64) if not len(column) else column.astype(np.int64)


def _ordinals(spans: Spans, what: Rows, phases: Rows) -> Rows:
    """Which call of its operator in its unit, phase and step launched each span; :data:`UNKNOWN` outside of units."""
    calls, found = _column(spans.calls, spans), np.full(len(spans), UNKNOWN, np.int64)
    rows = np.flatnonzero((calls != UNKNOWN) & (spans.units != UNKNOWN) & (spans.launches != UNKNOWN))
    if not len(rows):
        return found
    _, keys = grouped(spans.steps[rows], spans.units[rows], phases[rows], what[rows])
    rows = rows[order := np.lexsort((calls[rows], spans.launches[rows], keys))]
    keys = keys[order]
    new_key = np.append(True, np.diff(keys) != 0)
    new_call = new_key | np.append(True, np.diff(calls[rows]) != 0)
    number = np.cumsum(new_call)
    found[rows] = number - np.maximum.accumulate(np.where(new_key, number, 0))
    return found


PRIORITY = (Kind.COMPUTE, Kind.PREP, Kind.COPY, Kind.UNCLASSIFIED, Kind.COMM)
"""If spans run at the same time, the one whose kind comes first here owns the time."""

IDLE, END = "idle", "the end"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What owns ``ns`` nanoseconds of all steps together.

    ``count`` is the number of its spans that start in the steps, even if they own no time; for idle, of gaps.
    ``kernels`` are the names of its spans, each with the nanoseconds that it owns, the greatest first. ``longest`` is
    the span, or the gap, that owns most: the nanoseconds that it owns, its start and its end.
    """

    work: Work
    ns: int
    count: int
    kernels: tuple[tuple[str, int], ...] = ()
    longest: tuple[int, int, int] = (0, 0, 0)


def class_of_work(work: Work) -> OperatorClass:
    """By the operator, or else by the kernel; in the optimizer's step all else than products is the optimizer's."""
    code = (class_of_kernel if work.by_name else class_of_operator)(work.operator)
    return "optimizer" if work.phase == OPTIMIZER and code not in SURE else CLASSES[code]


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns the nanoseconds of steps of ``step_ns`` each, the greatest owner first; they add up to ``span_ns``."""

    step_ns: tuple[int, ...]
    owners: tuple[Owner, ...]

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.step_ns)

    @property
    def span_ns(self) -> int:
        """Length of all steps together."""
        return sum(self.step_ns)


def attribute(timeline: Timeline) -> Attribution:
    """Give every nanosecond of the steps to exactly one owner.

    If spans run at the same time, the kind first in :data:`PRIORITY` owns the time; within a kind, the span that
    started first; if these tie, the one on the first lane. Time in which nothing runs is owned by what ends it, and by
    its cause.

    Raises:
        ValueError: two steps overlap, so that a nanosecond would count twice.
    """
    windows = sorted(timeline.windows, key=lambda window: window.start)
    starts, ends = bounds(windows)
    if np.any(starts[1:] < ends[:-1]):
        raise ValueError("steps must not overlap each other, or their time would count twice")
    found: dict[Work, Owner] = {}
    works, work_of = works_of(timeline)
    of_spans = _of_spans(timeline.spans, works, work_of, starts, ends)
    for one in (*of_spans, *_of_idle(timeline, works, work_of, starts, ends)):
        old = found.get(one.work, Owner(work=one.work, ns=0, count=0))
        ns, count, kernels = old.ns + one.ns, old.count + one.count, (*old.kernels, *one.kernels)
        longest = max(old.longest, one.longest)
        found[one.work] = Owner(work=one.work, ns=ns, count=count, kernels=kernels, longest=longest)
    return Attribution(
        step_ns=tuple((ends - starts).tolist()),
        owners=tuple(sorted(found.values(), key=lambda o: (-o.ns, o.work.kind, o.work.operator))),
    )


def _owned(spans: Spans, free: Intervals) -> Nanoseconds:
    """Nanoseconds of ``free`` that each span owns."""
    owned = np.zeros(len(spans), np.int64)
    for kind in PRIORITY:
        rows = np.flatnonzero(spans.of_kind(kind))
        rows = rows[np.lexsort((spans.lanes[rows], spans.starts[rows]))]
        starts, ends = spans.starts[rows], spans.ends[rows]
        # Within its kind, a span owns the time after the end of all that started before it.
        reach = np.concatenate((starts[:1], np.maximum.accumulate(ends)[:-1]))
        owned[rows] = free.within(np.clip(reach, starts, ends), ends)
        free = free - Intervals.union(starts, ends)
    return owned


def _of_spans(
    spans: Spans, works: list[Work], work_of: Rows, starts: Nanoseconds, ends: Nanoseconds
) -> Iterator[Owner]:
    """Everything that ran in the windows."""
    if not len(spans):
        return
    owned = _owned(spans, Intervals.union(starts, ends))
    inside = np.searchsorted(starts, spans.starts, side="right") - 1
    begun = inside >= 0
    begun[begun] = spans.starts[begun] < ends[inside[begun]]
    several, kernels = len(spans.name_table), defaultdict[int, list[tuple[str, int]]](list)
    for key, ns, count in sorted(_sums(work_of * several + spans.names, owned, begun), key=lambda row: -row[1]):
        if ns or count:
            kernels[key // several].append((spans.name_table[key % several], ns))
    longest = _longest(work_of, owned, spans.starts, spans.ends)
    for work, ns, count in _sums(work_of, owned, begun.astype(np.int64)):
        if ns or count:
            most = longest[work]
            yield Owner(work=works[work], ns=ns, count=count, kernels=tuple(kernels[work]), longest=most)


def _of_idle(
    timeline: Timeline, works: list[Work], work_of: Rows, starts: Nanoseconds, ends: Nanoseconds
) -> Iterator[Owner]:
    """Every gap in the windows."""
    if not len(starts):
        return
    gaps = idle_gaps(timeline, int(starts[0]), int(ends[-1])).split(starts, ends)
    # What never comes has number -1, and so the work that is last.
    followers = np.append(work_of, len(works))[gaps.followers]
    keys, found = followers * len(CAUSES) + gaps.causes.astype(np.int64), knows_launches(timeline.spans)
    lengths = gaps.ends - gaps.starts
    longest = _longest(keys, lengths, gaps.starts, gaps.ends)
    for key, ns, count in _sums(keys, lengths, np.ones_like(followers)):
        follower, cause = divmod(key, len(CAUSES))
        after = works[follower] if follower < len(works) else Work(kind=IDLE, operator=END)
        bound = CAUSES[cause].replace("_", " ") if found else None
        work = Work(kind=IDLE, operator=after.operator, unit=after.unit, phase=after.phase, bound=bound)
        yield Owner(work=work, ns=ns, count=count, longest=longest[key])


def _longest(
    keys: Nanoseconds, ns: Nanoseconds, starts: Nanoseconds, ends: Nanoseconds
) -> dict[int, tuple[int, int, int]]:
    """The most nanoseconds of each key, with their start and end."""
    rows = np.lexsort((ns, keys))  # a later row replaces an earlier one
    last = rows[np.append(keys[rows][1:] != keys[rows][:-1], True)] if len(rows) else rows
    return dict(zip(keys[last].tolist(), zip(*(column[last].tolist() for column in (ns, starts, ends)))))


def _sums(keys: Nanoseconds, ns: Nanoseconds, counts: npt.NDArray[np.generic]) -> list[tuple[int, int, int]]:
    """Each key once, with the sums over its rows."""
    found, row_of = np.unique(keys, return_inverse=True)
    columns = (found, sums(row_of, ns, len(found)), sums(row_of, counts, len(found)))
    return list(zip(*(column.tolist() for column in columns)))
