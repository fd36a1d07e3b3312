"""Races of any program, against reachability in a graph."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refshard.dryrun.races import Conflict, find_races
from refshard.dryrun.recording import NO_STREAM, Kind, Recording
from tests.dryrun.touching import Touching


@dataclass
class Graph:
    """The reference: rows are nodes with edges to what has to wait for them; what comes before is what is reached."""

    recording: Recording
    before: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        last: dict[int, int] = {}
        events: dict[int, int] = {}
        host: list[int] = []
        columns = self.recording.kinds, self.recording.streams, self.recording.subjects, self.recording.sizes
        for row, (kind, stream, subject, size) in enumerate(zip(*(column.tolist() for column in columns))):
            edges: list[int] = []
            if kind in (Kind.LAUNCH, Kind.RECORD, Kind.WAIT):
                edges = [*host, *([last[stream]] if stream in last else [])]
                last[stream] = row
            if kind == Kind.RECORD:
                events[subject] = row
            elif kind == Kind.WAIT:
                edges += [events[subject]] if subject in events else []
            elif kind == Kind.SYNCHRONISE or (kind == Kind.SEGMENT and size < 0):
                awaited = [*events.values(), *last.values()]
                if subject:
                    awaited = [events[subject]] if subject in events else []
                elif stream != NO_STREAM:
                    awaited = [last[stream]] if stream in last else []
                edges = [*host, *awaited]
                host = [row]
            self.before[row] = set(edges).union(*(self.before[edge] for edge in edges))

    def ordered(self, earlier: int, later: int) -> bool:
        return earlier in self.before[later]


def brute_force(recording: Recording) -> Counter[tuple[Any, ...]]:
    """How often rows collide, by how and by the rows' names and streams."""
    graph = Graph(recording)
    begins = [0, *recording.access_ends.tolist()]
    touched: dict[int, dict[tuple[int, int], bool]] = defaultdict(dict)
    for row in np.flatnonzero(recording.kinds == Kind.LAUNCH).tolist():
        for at in range(begins[row], begins[row + 1]):
            start = int(recording.access_addresses[at])
            key = start, start + int(recording.access_sizes[at])
            touched[row][key] = touched[row].get(key, False) or bool(recording.access_writes[at])
    frees = [
        (row, int(recording.reads[row]), int(recording.reads[row] + recording.sizes[row]))
        for row in np.flatnonzero(recording.kinds == Kind.FREE).tolist()
    ]
    counted: Counter[tuple[Any, ...]] = Counter()
    for later, theirs in touched.items():
        for earlier, mine in touched.items():
            if earlier >= later or recording.streams[earlier] == recording.streams[later]:
                continue
            if graph.ordered(earlier, later):
                continue
            kinds = set()
            for (start, end), writes in mine.items():
                for (other_start, other_end), also in theirs.items():
                    if start < other_end and other_start < end and (writes or also):
                        reuse = any(earlier < row < later and at < end and start < stop for row, at, stop in frees)
                        kinds.add((reuse, writes, also))
            sites = tuple((int(recording.names[row]), int(recording.streams[row])) for row in (earlier, later))
            counted.update((*sites, *kind) for kind in kinds)
    return counted


def counted(recording: Recording) -> Counter[tuple[Any, ...]]:
    """The same of what was found."""
    name = recording.name_table.index
    return Counter(
        {
            (
                *((name(side.operator), side.stream) for side in (race.earlier, race.later)),
                race.conflict is Conflict.REUSE,
                race.earlier.writes,
                race.later.writes,
            ): race.times
            for race in find_races(recording)
        }
    )


STREAMS = st.integers(0, 3)
EVENTS = st.integers(1, 3)
ACCESSES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("launch"), STREAMS, ACCESSES, st.sampled_from("ab")),
    st.tuples(st.just("launch"), STREAMS, ACCESSES, st.sampled_from("ab")),
    st.tuples(st.just("launch"), STREAMS, ACCESSES, st.sampled_from("ab")),
    st.tuples(st.just("record"), STREAMS, EVENTS),
    st.tuples(st.just("wait"), STREAMS, EVENTS),
    st.tuples(st.just("order"), STREAMS, STREAMS),
    st.tuples(st.just("synchronise"), st.one_of(STREAMS, st.just(NO_STREAM)), st.one_of(EVENTS, st.just(0))),
    st.tuples(st.just("free"), st.integers(0, 12), st.integers(1, 5)),
    st.tuples(st.just("segment"), st.sampled_from((-1, 1))),
)


def program(steps: list[tuple[Any, ...]]) -> Recording:
    made = Touching()
    for what, *values in steps:
        if what == "launch":
            made.launch(values[2], stream=values[0], accesses=[(a, n, w) for a, n, w in values[1] if n])
        elif what == "record":
            made.record(values[0], values[1])
        elif what == "wait":
            made.wait(values[0], values[1])
        elif what == "order":
            made.wait(values[1], made.record(values[0], event=99))
        elif what == "synchronise":
            made.synchronise(stream=values[0], event=values[1])
        elif what == "free":
            made.give_back(values[0], values[1])
        else:
            made.segment(values[0])
    return made.recording()


@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_any_program_is_judged_as_reachability_judges_it(steps: list[tuple[Any, ...]]) -> None:
    recording = program(steps)
    assert counted(recording) == brute_force(recording)
