"""A section about a trace: a table under a title, and sentences about it."""

from collections.abc import Sequence

from refshard.report.blocks import Block, Notes, Row, Section, table


def section(
    *, title: str, caption: str, rows: Sequence[Row], sentences: Sequence[str] = (),
    text: Sequence[str] = (), brief: bool = False, shown: int = 10,
) -> Section:  # fmt: skip
    """All ``rows`` have the same keys, the heads of their columns; the first and those in ``text`` hold text, the
    others figures. ``caption`` explains the rows. A terminal shows the first ``shown`` rows of a ``brief`` section, and
    those of others with ``--verbose``.
    """
    blocks: list[Block] = [table(rows, text=text, caption=caption, shown=shown), Notes(sentences=sentences)]
    return Section(title=title, blocks=blocks, where="always" if brief else "detail")
