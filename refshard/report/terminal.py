"""A run in a terminal: the verdict in sentences, then one table per setting, made to fit 140 columns."""

import textwrap

from tabulate import tabulate

from refshard.records import Run
from refshard.report.cases import Setting, plain, settings
from refshard.report.verdict import verdict
from refshard.report.views import summary_table

WIDTH = 120
_HEADERS = {
    "step time (95 % interval)": "step time\n(95 % interval)",
    "tokens/s/GPU": "tokens/s\n/GPU",
    "peak memory": "peak\nmemory",
    "exposed communication": "exposed comm.\n(of step)",
    "overlap ratio": "overlap\nratio",
    "loss parity": "loss\nparity",
}


def terminal_verdict(run: Run) -> str:
    """The verdict, one item per sentence."""
    return "\n".join(
        textwrap.fill(plain(sentence), WIDTH, initial_indent="* ", subsequent_indent="  ") for sentence in verdict(run)
    )


def terminal_table(run: Run) -> str:
    """One table per setting, headed by its label."""
    return "\n\n".join(f"{plain(setting.label)}\n\n{_table(setting)}" for setting in settings(run))


def _table(setting: Setting) -> str:
    table = summary_table(setting.cases).map(plain)
    return tabulate(
        table.values.tolist(),
        headers=[_HEADERS.get(column, column) for column in table.columns],
        tablefmt="simple",
        disable_numparse=True,  # the cells are text already; numbers must keep their digits
        colalign=["left", "right", "left", *["right"] * (len(table.columns) - 3)],
    )
