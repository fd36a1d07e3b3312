"""What is said of exposed communication: one sentence that answers what bounds it, and two tables."""

from typing import Any

import msgspec
import pytest

from refshard.analysis.figures import CommunicationFigures, ExposedSplit, MessageFigures, PeerWait, TraceFigures
from refshard.report.trace.communication import answer, exposed_section, messages_section, unknown_waiting
from refshard.report.trace.sections import sections_of
from tests.report import traces
from tests.report.printed import opened

MS, GB, MIB = 1_000_000, 1e9, 2**20


def message(**given: Any) -> MessageFigures:
    known = {
        "op": "all_reduce", "group": "3 [0-7]", "description": "mesh_tp", "group_size": 8, "nodes": 1, "count": 6,
        "bytes": 96 * MIB, "least_bytes": 16 * MIB, "most_bytes": 16 * MIB, "exposed_ns": 18 * MS, "waiting_ns": None,
        "bus_bandwidth": 3.5 * GB, "transfer_bandwidth": None, "largest_bandwidth": 4 * GB, "link_bandwidth": 300 * GB,
        "is_latency_bound": False,
    }  # fmt: skip
    return MessageFigures(**{**known, **given})


def part(step: int | None, **given: Any) -> ExposedSplit:
    known = {
        "exposed_ns": 10 * MS, "transfer_ns": None, "waiting_ns": None, "undivided_ns": 10 * MS, "launch_ns": 2 * MS,
    }  # fmt: skip
    return ExposedSplit(step=step, **{**known, **given})


def figures(bound: Any, *messages: MessageFigures, steps: int = 2, device: str = "", **given: Any) -> TraceFigures:
    known = {
        "whole": part(None), "steps": tuple(part(step) for step in range(steps)), "messages": messages or (message(),),
        "bound": bound, "profile": "mi300x", "missing": "the traces of the other ranks are not here", "no_launch": None,
    }  # fmt: skip
    base = traces.figures(traces.gpu(layers=2, steps=2))
    told = CommunicationFigures(**{**known, **given})
    return msgspec.structs.replace(base, communication=told, device=device or base.device)


WAITED = {
    "exposed_ns": 10 * MS, "transfer_ns": 3 * MS, "waiting_ns": 6 * MS, "undivided_ns": MS,
    "waits_for": (PeerWait(rank=5, waited_ns=4 * MS), PeerWait(rank=3, waited_ns=2 * MS)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            figures("below"),
            "Below the link: all_reduce of 16.0 MiB (mesh_tp [0-7], inside a node) reaches 3.50 of 300 GB/s (profile "
            "mi300x), waiting for other ranks included.",
        ),
        (
            figures("bandwidth", message(transfer_bandwidth=280 * GB, nodes=2, description=None)),
            "Bandwidth-bound: all_reduce of 16.0 MiB (3 [0-7], 2 nodes) reaches 280 of 300 GB/s (profile mi300x), "
            "without waiting.",
        ),
        (
            figures("unknown", message(link_bandwidth=None), profile=None, device="NVIDIA X"),
            "all_reduce of 16.0 MiB (mesh_tp [0-7], inside a node) reaches 3.50 GB/s, waiting for other ranks "
            "included; the link's rate is unknown: no cluster profile names NVIDIA X.",
        ),
        (figures("unknown", message(link_bandwidth=None), profile=None, device="cpu"), ""),
        (
            figures("unknown", message(bus_bandwidth=None, group=None, group_size=None, nodes=None)),
            "Most exposed communication is all_reduce of 16.0 MiB; its bandwidth is unknown: the trace does not say "
            "how many ranks its group has.",
        ),
        (
            figures("latency", message(exposed_ns=5 * MS), message(exposed_ns=15 * MS, is_latency_bound=True)),
            "Latency-bound: 75 % of exposed communication is in messages whose time hardly depends on their size; most "
            "in all_reduce of 16.0 MiB (mesh_tp [0-7], inside a node).",
        ),
        (
            figures("skew", steps=0, whole=part(None, **WAITED)),
            "Skew: 60 % of exposed communication is waiting for ranks that enter late, 67 % of that for rank 5.",
        ),
        (figures(None), ""),
    ],
)
def test_one_sentence_answers_bandwidth_latency_or_skew(told: TraceFigures, sentence: str) -> None:
    assert answer(told) == sentence


def test_what_is_unknown_has_no_column_and_a_reason() -> None:
    section = opened(exposed_section(figures("below")))
    assert [list(row.values()) for row in section.rows] == [
        ["step 0", "10.0 ms", "10.0 ms", "2.00 ms"], ["step 1", "10.0 ms", "10.0 ms", "2.00 ms"],
    ]  # fmt: skip
    assert list(section.rows[0]) == ["", "exposed", "transfer or waiting", "idle before late launch"]
    assert list(section.sentences) == [
        "Transfer and waiting cannot be told apart: the traces of the other ranks are not here. Record the same steps "
        "on all 8 ranks, a file each, and run refshard trace on their folder."
    ]


NOT_HERE = "Waiting for other ranks cannot be told from a slow link: the traces of the other ranks are not here. "
FOLDER = ", a file each, and run refshard trace on their folder."


@pytest.mark.parametrize(
    ("told", "size", "sentence"),
    [
        (figures("below"), 8, f"{NOT_HERE}Record the same steps on all 8 ranks{FOLDER}"),
        (figures("unknown"), 2, f"{NOT_HERE}Record the same steps on both ranks{FOLDER}"),
        (figures("unknown"), None, f"{NOT_HERE}Record the same steps on all ranks{FOLDER}"),
        (figures("bandwidth"), 8, ""),  # a full link leaves no room for waiting
        (figures("latency"), 8, ""),
        (figures("below", missing=None), 8, ""),
        (figures("below", steps=0, whole=part(None, undivided_ns=4 * MS, transfer_ns=6 * MS)), 8, ""),
    ],
)
def test_waiting_that_one_rank_cannot_tell_is_said_with_what_to_record(
    told: TraceFigures, size: int | None, sentence: str
) -> None:
    assert unknown_waiting(msgspec.structs.replace(told, world_size=size)) == sentence


def test_waiting_is_told_with_whom_it_is_for() -> None:
    section = opened(
        exposed_section(figures("skew", steps=0, whole=part(None, **WAITED), missing=None, no_launch="no host"))
    )
    assert dict(section.rows[0]) == {
        "": "whole trace", "exposed": "10.0 ms", "transfer": "3.00 ms", "waiting": "6.00 ms",
        "waits for": "rank 5 4.00 ms, rank 3 2.00 ms", "transfer or waiting": "1.00 ms",
        "idle before late launch": "2.00 ms",
    }  # fmt: skip
    assert section.sentences[-1] == "Late launches of some steps are unknown: no host."


def test_what_is_mostly_divided_is_not_said_to_be_unknown() -> None:
    """9 of 10 ms are divided; a reason that concerns what lies outside the steps is not told."""
    mixed = figures("skew", steps=0, whole=part(None, **WAITED), missing="a rank is not here")
    section = opened(exposed_section(mixed))
    assert section.sentences[0] == (
        "In 1.00 ms of 10.0 ms, transfer and waiting cannot be told apart: a rank is not here. Record the same steps "
        "on all 8 ranks, a file each, and run refshard trace on their folder."
    )
    assert mixed.communication is not None
    inside = part(0, **{**WAITED, "transfer_ns": 4 * MS, "undivided_ns": 0})
    communication = msgspec.structs.replace(mixed.communication, steps=(inside,))
    section = opened(exposed_section(msgspec.structs.replace(mixed, communication=communication)))
    assert not any("told apart" in sentence for sentence in section.sentences)


def test_a_trace_without_communication_has_no_section() -> None:
    none = figures(None, whole=part(None, exposed_ns=0, undivided_ns=0))
    assert exposed_section(none) is None
    assert messages_section(msgspec.structs.replace(none, communication=None)) is None
    assert [s.title for s in sections_of(figures("below"))][:2] == ["Exposed communication", "Messages"]
