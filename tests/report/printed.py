"""Answers as users read them."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from refshard.report import forms
from refshard.report.blocks import Answer, Block, Cell, Notes, Section, Table, Verdict, cell_text


def text(answer: Answer, width: int | None = None, *, verbose: bool = False) -> str:
    """What a terminal of ``width`` columns shows, or a file."""
    return forms.as_text(answer, forms.Paper(width=width), verbose=verbose)


def words(answer: Answer, *, verbose: bool = False) -> str:
    """The text on one line, so that it does not matter where sentences wrap."""
    return " ".join(text(answer, verbose=verbose).split())


def verdict(answer: Answer) -> list[str]:
    """The sentences of the verdict."""
    return [s for block in answer.blocks if isinstance(block, Verdict) for s in block.sentences]


def notes(answer: Answer) -> list[str]:
    """The sentences that are no verdict."""
    return [s for block, _ in _flattened(answer.blocks) if isinstance(block, Notes) for s in block.sentences]


def tables(answer: Answer, *, detail: bool | None = None) -> list[Table]:
    """The tables of a terminal that have rows; only details, or none, if that is said."""
    found = [(block, folded) for block, folded in _flattened(answer.blocks) if isinstance(block, Table) and block.rows]
    return [block for block, folded in found if detail is None or folded is detail]


def _flattened(blocks: Iterable[Block], *, folded: bool = False) -> Iterator[tuple[Block, bool]]:
    """The blocks that a terminal shows, those of sections too, and whether each is a detail."""
    for block in blocks:
        detail = folded or block.where == "detail"
        if isinstance(block, Section):
            yield from _flattened(block.blocks, folded=detail) if block.where != "page" else ()
        elif block.where != "page":
            yield block, detail


def rows(table: Table) -> list[dict[str, str]]:
    """A table's cells by the heads of its columns, on one line each."""
    heads = [_flat(column.head) for column in table.columns]
    return [dict(zip(heads, map(_flat, row))) for row in table.rows]


def _flat(cell: Cell) -> str:
    return " ".join(cell_text(cell).split())


@dataclass(frozen=True)
class Opened:
    """What a section holds: its table's rows as text, and its sentences."""

    title: str
    caption: str
    rows: list[dict[str, str]]
    sentences: tuple[str, ...]
    brief: bool


def opened(section: Section | None) -> Opened:
    """A section that must be there, with a table and notes."""
    assert section is not None
    tables = [block for block in section.blocks if isinstance(block, Table)]
    notes = [sentence for block in section.blocks if isinstance(block, Notes) for sentence in block.sentences]
    return Opened(section.title, tables[0].caption, rows(tables[0]), tuple(notes), section.where == "always")


def as_json(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints, read back."""
    found: dict[str, Any] = json.loads(forms.as_json(answer, "command"))
    assert (found.pop("schema_version"), found.pop("command")) == (forms.SCHEMA_VERSION, "command")
    return found


def as_csv(answer: Answer) -> list[dict[str, str]]:
    """What ``--csv`` prints, read back."""
    return list(csv.DictReader(io.StringIO(forms.as_csv(answer), newline=""), strict=True))
