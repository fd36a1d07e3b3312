"""The palette of all charts.

Colours are Okabe and Ito's, which people with colour-blindness can tell apart (M. Okabe and K. Ito, "Color
Universal Design", 2008). No meaning rests on colour alone: a pattern, a marker, a dash or a name says the same.
"""

from dataclasses import dataclass

from refshard.events.timeline import Kind

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = OKABE_ITO = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
GREY = "#999999"
"""Colour of references, and of anything without a class."""
INK = "#777777"
"""Colour of text and lines, legible on black and on white; in text the page's style replaces it."""
PATTERNS = ("", "/", "x", "\\", "-", ".", "|", "+")
MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True, slots=True)
class Look:
    """How a part is filled."""

    colour: str
    pattern: str = ""


def look(place: int) -> Look:
    """The look of the part at ``place`` among parts that have no look of their own."""
    return Look(OKABE_ITO[place % len(OKABE_ITO)], PATTERNS[place % len(PATTERNS)])


def dimmed(colour: str) -> str:
    """The colour at low opacity."""
    return f"{colour}47"


SPANS = {
    Kind.COMPUTE.value: Look(BLUE),
    Kind.COMM.value: Look(ORANGE, "/"),
    Kind.PREP.value: Look(PINK, "x"),
    Kind.COPY.value: Look(GREEN, "."),
    Kind.UNCLASSIFIED.value: Look(GREY, "-"),
    "unit": Look("#7d8fa3"),
    "unit-odd": Look("#a9b6c4"),
    "exposed": Look(RED, "\\"),
    "idle-launch": Look(YELLOW, "|"),
    "idle-call": Look("#b8860b", "x"),
    "idle-back_to_back": Look("#d9d9d9", "-"),
    "idle-dependency": Look("#9a9a9a", "."),
    "idle-unknown": Look("#bbbbbb"),
    "gap": Look(INK),
    "gap-blocking": Look(RED, "|"),
}
"""Looks of blocks on lanes, by :attr:`refshard.report.trace.lanes.Blocks.style`."""

STEP = {
    "compute alone": Look(BLUE),
    "compute over communication": Look(SKY, "."),
    "overlapped communication": Look(SKY, "."),
    "exposed communication": Look(RED, "\\"),
    "other": Look(PINK, "x"),
    "copy, preparation, other": Look(PINK, "x"),
    "idle, launch-bound": Look(YELLOW, "|"),
    "idle, blocked call": Look("#b8860b", "x"),
    "idle, back to back": Look("#d9d9d9", "-"),
    "idle, waiting for a stream": Look("#9a9a9a", "."),
    "idle, cause unknown": Look("#bbbbbb"),
    "idle": Look("#bbbbbb"),
}
"""Looks of the parts of a step."""

WORK = {
    "matrix products": Look(BLUE),
    "attention": Look(SKY, "/"),
    "convolutions": Look("#004a75", "x"),
    "norms": Look("#8f7fc4", "."),
    "elementwise kernels": Look("#5b8f8a", "\\"),
    "optimizer": Look(ORANGE, "-"),
    "other kernels": Look(GREY, "+"),
}
"""Looks of compute, by class of work."""

MEMORY = {
    "parameters": Look(BLUE),
    "optimizer": Look(ORANGE, "/"),
    "gradients": Look(GREEN, "x"),
    "unsharded": Look(PINK, "\\"),
    "activations": Look(SKY, "."),
    "workspace": Look(YELLOW, "-"),
    "other": Look(GREY, "+"),
}
"""Looks of the categories of memory, from below: persistent ones, then transient ones."""
