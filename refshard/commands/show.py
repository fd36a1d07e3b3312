"""``refshard show``: a run's verdict and tables, for people or for programs."""

import json
from pathlib import Path

from refshard.harness.store import read_run
from refshard.report import views


def show(run: Path, *, as_json: bool) -> str:
    """The run in the folder ``run``: its verdict and tables, or with ``as_json`` an array with an object per case.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
    """
    finished = read_run(run)
    if as_json:
        return json.dumps(views.as_json(finished), indent=2, allow_nan=False)
    return f"{views.terminal_verdict(finished)}\n\n{views.terminal_table(finished)}"
