"""The section on what ifs: its rows, the order in which fixing pays, and the critical path, in words."""

import msgspec
import pytest

from refshard.analysis import figures as whatif
from refshard.analysis.figures import CriticalPath, PathPart, TraceFigures, WhatIf, WhatIfFigures
from refshard.report.trace.whatif import what_if_section
from tests.report import traces
from tests.report.printed import opened

MS = 1_000_000
FIGURES = WhatIfFigures(
    steps=3,
    step_ns=100 * MS,
    replay_error=0.002,
    waits_recorded=0,
    waits_inferred=1234,
    only_launches=False,
    what_ifs=(
        WhatIf(what=whatif.LAUNCHES, step_ns=80 * MS, gain_ns=20 * MS),
        WhatIf(what=whatif.OVERLAPPED, step_ns=90 * MS, gain_ns=10 * MS),
        WhatIf(what=whatif.KERNEL, step_ns=100 * MS, gain_ns=0, detail="gemm"),
    ),
    order=(
        WhatIf(what=whatif.LAUNCHES, step_ns=80 * MS, gain_ns=20 * MS),
        WhatIf(what=whatif.KERNEL, step_ns=65 * MS, gain_ns=15 * MS, detail="gemm"),
        WhatIf(what=whatif.OVERLAPPED, step_ns=64_900_000, gain_ns=100_000),
    ),
    path=CriticalPath(
        parts=(PathPart(kind="host", ns=70 * MS), PathPart(kind="compute", ns=29_800_000), PathPart(kind="copy", ns=9)),
        owners=(
            PathPart(kind="host", ns=60 * MS, name="before aten::add"),
            PathPart(kind="compute", ns=29 * MS, name="gemm"),
        ),
    ),
)


def with_figures(what_if: WhatIfFigures | None) -> TraceFigures:
    return msgspec.structs.replace(traces.figures(traces.gpu(layers=2)), what_if=what_if)


def test_a_host_that_bounds_the_step_is_not_excused() -> None:
    free = WhatIf(what=whatif.LAUNCHES, step_ns=60 * MS, gain_ns=40 * MS)
    section = opened(what_if_section(with_figures(msgspec.structs.replace(FIGURES, what_ifs=(free,)))))
    assert section.sentences[-1].startswith("Longest on it")


def test_no_order_where_the_replay_is_off() -> None:
    section = opened(what_if_section(with_figures(msgspec.structs.replace(FIGURES, replay_error=0.11, order=()))))
    assert section.sentences[0] == (
        "The replay is 11.0 % off the trace's own time, because the trace does not show what the host or some work "
        "waited for: the gains are uncertain, and no order is given."
    )


def test_gains_that_are_less_than_the_replay_is_off_are_not_shown() -> None:
    section = opened(what_if_section(with_figures(msgspec.structs.replace(FIGURES, replay_error=0.97, order=()))))
    assert section.rows == []
    assert section.sentences[:2] == (
        "What if cannot be told: the replay is 97.0 % off the trace's own time, because the trace does not show what "
        "the host or some work waited for.",
        "Critical path of the step: host and launches 70 %, compute 30 %.",
    )


@pytest.mark.parametrize(
    ("gain", "kind", "comm", "told"),
    [
        (0, "host", 40, "but overlapping it gains nothing: the host launches what follows no sooner."),
        (10, "host", 90, "but overlapping it gains 10.0 ms: communication itself takes 90.0 ms."),
        (10, "compute", 40, "but overlapping it gains 10.0 ms: what follows waits for other work too."),
        (29.6, "host", 40, None),  # under half a percent of the step apart
    ],
)
def test_a_gain_that_is_not_the_exposed_time_is_explained(gain: float, kind: str, comm: int, told: str | None) -> None:
    """30 of 100 ms are exposed."""
    ns = int(gain * MS)
    found = msgspec.structs.replace(
        FIGURES,
        what_ifs=(WhatIf(what=whatif.OVERLAPPED, step_ns=100 * MS - ns, gain_ns=ns),),
        path=CriticalPath(
            parts=(PathPart(kind="communication", ns=60 * MS), PathPart(kind=kind, ns=40 * MS)), owners=()
        ),
    )
    figures = with_figures(found)
    steps = tuple(
        msgspec.structs.replace(
            step, breakdown=msgspec.structs.replace(step.breakdown, comm_ns=comm * MS, exposed_ns=30 * MS)
        )
        for step in figures.steps
    )
    section = opened(what_if_section(msgspec.structs.replace(figures, steps=steps)))
    sentences = [one for one in section.sentences if one.startswith("Communication is exposed")]
    assert sentences == ([] if told is None else [f"Communication is exposed for 30.0 ms a step, {told}"])


def test_a_cpu_trace_says_why_it_has_no_what_if() -> None:
    section = opened(what_if_section(msgspec.structs.replace(with_figures(None), device="cpu")))
    assert not section.brief
    assert section.sentences == (
        "What if cannot be told: a CPU trace records no launches, so it has no dependency graph to replay.",
    )


def test_nothing_to_gain_and_no_figures() -> None:
    section = opened(what_if_section(with_figures(msgspec.structs.replace(FIGURES, order=()))))
    assert section.sentences[0] == "None of these would make a difference."
    assert what_if_section(with_figures(None)) is None


def test_a_trace_that_holds_only_launches_is_doubted() -> None:
    section = opened(what_if_section(with_figures(msgspec.structs.replace(FIGURES, only_launches=True))))
    assert section.sentences[2] == (
        "The trace holds no calls but launches: if the host waited for the device, that counts as its own time."
    )
