"""How each kind of time looks, in the timeline, the drawing of a layer, the charts and the legend.

Colours are Okabe and Ito's; a pattern tells kinds apart without colour. ``ink`` is the colour of text on it.
"""

from dataclasses import dataclass

from refshard.timeline import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The look of one kind of time, and what it is called in a legend."""

    label: str
    colour: str
    pattern: str = ""
    ink: str = "#000000"


STYLES = {
    Kind.COMPUTE.value: Style(label="compute", colour="#0072B2", ink="#ffffff"),
    Kind.COMM.value: Style(label="communication", colour="#E69F00", pattern="/"),
    Kind.PREP.value: Style(label="preparation of a reduction", colour="#CC79A7", pattern="x"),
    Kind.COPY.value: Style(label="copy", colour="#009E73", pattern="."),
    Kind.UNCLASSIFIED.value: Style(label="unclassified", colour="#999999", pattern="-"),
    "unit": Style(label="unit (layer)", colour="#7d8fa3", ink="#000000"),
    "unit-odd": Style(label="unit (layer)", colour="#a9b6c4", ink="#000000"),
    "exposed": Style(label="exposed communication", colour="#D55E00", pattern="\\"),
    "idle-host": Style(label="idle, host-bound", colour="#F0E442", pattern="|"),
    "idle-dependency": Style(label="idle, dependency-bound", colour="#9A9A9A", pattern="."),
    "idle": Style(label="idle, cause unknown", colour="#BBBBBB"),
    "gap": Style(label="gap between collectives", colour="#777777"),
    "gap-blocking": Style(label="blocking gap between collectives", colour="#D55E00", pattern="|"),
}
"""By the name that groups of :mod:`refshard.report.trace.lanes` carry; kinds go by their value."""

LEGEND = tuple(name for name in STYLES if name != "unit-odd")
