"""The sections of a trace, in the order of reading."""

from collections.abc import Callable

from refshard.report.blocks import Section
from refshard.report.trace.communication import exposed_section, messages_section
from refshard.report.trace.graphs import graphs
from refshard.report.trace.holdups import holdups_section
from refshard.report.trace.idle import idle_section
from refshard.report.trace.lone_copies import lone_copy_section
from refshard.report.trace.memory import memory_at_peak, memory_by_unit
from refshard.report.trace.operators import (
    class_section,
    contention_section,
    kernel_section,
    operator_section,
    shape_section,
)
from refshard.report.trace.whatif import what_if_section
from refshard.report.trace.windows import windows_section
from refshard.tracing.figures import TraceFigures

SECTIONS: tuple[Callable[[TraceFigures], Section | None], ...] = (
    windows_section,
    exposed_section,
    messages_section,
    idle_section,
    lone_copy_section,
    what_if_section,
    holdups_section,
    class_section,
    operator_section,
    shape_section,
    kernel_section,
    contention_section,
    memory_at_peak,
    memory_by_unit,
    graphs,
)
"""What makes each section of a trace, in the order of reading; None where the trace cannot tell."""


def sections_of(figures: TraceFigures) -> tuple[Section, ...]:
    """The sections of one trace."""
    return tuple(found for make in SECTIONS if (found := make(figures)) is not None)
