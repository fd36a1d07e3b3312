"""Answers as those who ask meet them."""

import csv
import io
import json
from typing import Any

from refshard.report import forms
from refshard.report.answer import Answer, Cell, Notes, Table, Verdict


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
    return [s for block in answer.blocks if isinstance(block, Notes) for s in block.sentences]


def tables(answer: Answer, *, detail: bool | None = None) -> list[Table]:
    """The tables that have rows; only details, or none, if that is said."""
    found = [block for block in answer.blocks if isinstance(block, Table) and block.rows]
    return [one for one in found if detail is None or one.detail is detail]


def rows(table: Table) -> list[dict[str, str]]:
    """A table's cells by the heads of its columns, on one line each."""
    heads = [_flat(column.head) for column in table.columns]
    return [dict(zip(heads, map(_flat, row))) for row in table.rows]


def _flat(cell: Cell) -> str:
    return " ".join(str(cell).split())


def as_json(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints, read back."""
    found: dict[str, Any] = json.loads(forms.as_json(answer, "command"))
    assert (found.pop("schema_version"), found.pop("command")) == (forms.SCHEMA_VERSION, "command")
    return found


def as_csv(answer: Answer) -> list[dict[str, str]]:
    """What ``--csv`` prints, read back."""
    return list(csv.DictReader(io.StringIO(forms.as_csv(answer), newline=""), strict=True))
