"""What is told of a trace beyond its breakdown: a table under a title, which a terminal and a page show alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows of text under a title, and sentences about them.

    All ``rows`` have the same keys, the heads of their columns; the first and those in ``text`` hold words, the others
    figures. ``caption`` says what the rows are. A terminal shows the first ``shown`` rows of a ``brief`` section, and
    those of others with ``--verbose``.
    """

    title: str
    caption: str
    rows: Sequence[Mapping[str, str]]
    sentences: Sequence[str] = ()
    text: tuple[str, ...] = ()
    brief: bool = False
    shown: int = 10
