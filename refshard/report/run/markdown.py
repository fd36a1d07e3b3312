"""A run's verdict and main tables as Markdown, for a pull request or a job's summary."""

import re

import pandas as pd
from tabulate import tabulate

from refshard.analysis.cases import plain
from refshard.analysis.evidence import Evidence
from refshard.report.run import views
from refshard.report.run.verdict import verdict

_ACTIVE = re.compile(r"([\\`*_{}\[\]<>#|~])")
_COLUMNS = ("strategy", "ranks", "state")
"""Columns of text or of counts; numbers stand right."""


def as_markdown(evidence: Evidence) -> str:
    """The verdict as a list, then a table for each setting under its label, in GitHub's dialect."""
    told = "\n".join(f"- {inline(sentence)}" for sentence in verdict(evidence))
    tables = [
        f"### {inline(setting.label)}\n\n{_table(views.summary_table(setting.cases))}" for setting in evidence.settings
    ]
    return "\n\n".join([f"## {inline(_title(evidence))}", told, *tables])


def inline(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> print(inline("a_b | <i>\nc"))
    a\_b \| \<i\> c
    """
    return _ACTIVE.sub(r"\\\1", " ".join(plain(text).split()))


def _title(evidence: Evidence) -> str:
    return ", ".join(dict.fromkeys(run.header.suite.name for run in evidence.runs))


def _table(table: pd.DataFrame) -> str:
    return tabulate(
        table.map(inline).values.tolist(),
        headers=[inline(column) for column in table.columns],
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left" if column in _COLUMNS else "right" for column in table.columns],
    )
