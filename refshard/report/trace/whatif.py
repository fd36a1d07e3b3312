"""A section of a trace: what a step would take with one cause of lost time gone, and in which order fixing pays."""

from refshard.analysis import figures as whatif
from refshard.analysis.figures import TOLERATED_ERROR, PathPart, TraceFigures, WhatIf, WhatIfFigures
from refshard.analysis.names import name_in_words
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.wording import counted, each, has_steps, in_each, parts, section

_NAMES = {
    whatif.OVERLAPPED: "communication fully overlapped",
    whatif.ON_TIME: "every rank on time",
    whatif.LAUNCHES: "host and launches take no time",
    whatif.NO_SYNC: "no synchronisation with the host",
}
_PATH = {
    "compute": "compute",
    "communication": "communication",
    "copy": "copies and preparation",
    "host": "host and launches",
    "between_kernels": "between kernels",
    "unexplained": "unexplained",
}
_SMALL = 0.005
"""A gain under this share of the step is not named in the order, nor a part of the path."""
_NEAR = 0.03
"""A step this much longer than its communication is bound by that."""
_OWNERS = 3
_MUCH = 0.1
"""From this share of the path on, a reader may think that the host bounds the step."""


def what_if_section(figures: TraceFigures) -> Section | None:
    """Each change with the step that it leads to; the order in which they pay; and the critical path."""
    found = figures.what_if
    if found is None:
        return _not_on_a_cpu() if figures.device == "cpu" else None
    what = each(figures)
    gains = found.what_ifs if _is_telling(found) else ()
    rows = [
        {"what if": _name(one), f"{what} takes": format_ns(one.step_ns), "gain": _gain(one, found.step_ns)}
        for one in gains
    ]
    of = f"the mean of {counted(found.steps, what)}" if has_steps(figures) else "the whole trace"
    doubt = (
        "The trace holds no calls but launches: if the host waited for the device, that counts as its own time."
        if found.only_launches
        else ""
    )
    known = (_order(found), _beside_exposed(figures, found) if gains else "", doubt, *_path(found, what))
    return section(
        title=f"What if: the {what} replayed with one change",
        caption=f"Replays of the trace's dependency graph, over {of} ({format_ns(found.step_ns)}). "
        f"{counted(found.waits_recorded, 'wait')} between streams recorded, {found.waits_inferred:,} inferred.",
        rows=rows,
        sentences=tuple(sentence for sentence in known if sentence),
        brief=True,
    )


def _not_on_a_cpu() -> Section:
    return section(
        title="What if",
        caption="",
        rows=(),
        sentences=(
            "What if cannot be told: a CPU trace records no launches, so it has no dependency graph to replay.",
        ),
    )


def _is_telling(found: WhatIfFigures) -> bool:
    """Whether a gain exceeds what the replay is off by, if that is much."""
    largest = max((one.gain_ns for one in found.what_ifs), default=0)
    return found.replay_error <= TOLERATED_ERROR or largest >= found.replay_error * found.step_ns


def _order(found: WhatIfFigures) -> str:
    """In which order fixing things pays, or why that cannot be said."""
    if found.replay_error > TOLERATED_ERROR:
        off = f"{format_percent(found.replay_error)} off the trace's own time"
        why = "because the trace does not show what the host or some work waited for"
        if not _is_telling(found):
            return f"What if cannot be told: the replay is {off}, {why}."
        return f"The replay is {off}, {why}: the gains are uncertain, and no order is given."
    worth = [one for one in found.order if one.gain_ns >= _SMALL * found.step_ns]
    if not worth:
        return "None of these would make a difference."
    steps = [f"{_name(one)}, {format_ns(one.step_ns)}" for one in worth]
    off = f"Unchanged, the replay is {format_percent(found.replay_error)} off."
    return f"Best order: {'; then also '.join(steps)}. {off}"


def _beside_exposed(figures: TraceFigures, found: WhatIfFigures) -> str:
    """Why overlapping communication gains another time than is exposed; empty where it does not."""
    one = next((one for one in found.what_ifs if one.what == whatif.OVERLAPPED), None)
    if one is None:
        return ""
    every = [part.breakdown for part in parts(figures)]
    exposed, comm = (sum(getattr(part, key) for part in every) / len(every) for key in ("exposed_ns", "comm_ns"))
    if abs(one.gain_ns - exposed) < _SMALL * found.step_ns:
        return ""
    gained = f"overlapping it gains {format_ns(one.gain_ns) if one.gain_ns else 'nothing'}"
    return (
        f"Communication is exposed for {format_ns(exposed)} {in_each(figures)}, but {gained}: "
        f"{_why(found, one, exposed, comm)}."
    )


def _why(found: WhatIfFigures, one: WhatIf, exposed: float, comm: float) -> str:
    if one.gain_ns > exposed:
        return "idle time before and after it goes too"
    if one.step_ns <= (1 + _NEAR) * comm:
        return f"communication itself takes {format_ns(comm)}"
    path = [part for part in found.path.parts if part.kind != whatif.COMMUNICATION]
    most = max(path, key=lambda part: part.ns, default=None)
    if most is not None and most.kind == whatif.HOST:
        return "the host launches what follows no sooner"
    return "what follows waits for other work too"


def _path(found: WhatIfFigures, what: str) -> list[str]:
    """What the critical path is made of, and the kernels and host calls that it goes through longest."""
    parts = [
        f"{_PATH[part.kind]} {format_percent(part.ns / found.step_ns, 0)}"
        for part in found.path.parts
        if part.ns >= _SMALL * found.step_ns
    ]
    owners = [
        f"{_owner(part)} {format_percent(part.ns / found.step_ns, 0)}"
        for part in found.path.owners[:_OWNERS]
        if part.ns >= _SMALL * found.step_ns
    ]
    sentences = [f"Critical path of the {what}: {', '.join(parts)}."] if parts else []
    sentences += [f"Longest on it: {', '.join(owners)}."] if owners else []
    return [*sentences, *_not_by_the_host(found)]


def _not_by_the_host(found: WhatIfFigures) -> list[str]:
    """A path through the host says little about it where launches that cost nothing would gain little."""
    on_path = sum(part.ns for part in found.path.parts if part.kind == whatif.HOST)
    gains = [one.gain_ns for one in found.what_ifs if one.what == whatif.LAUNCHES]
    if not gains or on_path < _MUCH * found.step_ns or gains[0] >= on_path / 2:
        return []
    return [
        f"Without the time of host and launches, only {format_ns(gains[0])} would be gained: while the host is on the "
        "path, the device is mostly busy with other work."
    ]


def _owner(part: PathPart) -> str:
    name = part.name or ""
    before = "before " if name.startswith("before ") else ""
    found = name_in_words(name.removeprefix(before))
    return f"host code {before}{found}" if before else found


def _name(one: WhatIf) -> str:
    return f"{name_in_words(one.detail or '')} twice as fast" if one.what == whatif.KERNEL else _NAMES[one.what]


def _gain(one: WhatIf, base: int) -> str:
    return f"{format_ns(one.gain_ns)} ({format_percent(one.gain_ns / base)})" if one.gain_ns else "none"
