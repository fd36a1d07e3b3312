"""``refshard show``: a run's verdict and tables, for people or for programs."""

import json
from pathlib import Path

from refshard.harness.store import read_run
from refshard.report import views
from refshard.report.ratios import check_peer, ratio_columns, terminal_ratios


def show(run: Path, *, as_json: bool, against: str | None = None) -> str:
    """The run in the folder ``run``: its verdict and tables, or with ``as_json`` an array with an object per case.

    ``against`` names the strategy that every other is compared with: ratios in a table instead, or beside each case.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: no case of the run is of the strategy ``against``.
    """
    finished = read_run(run)
    if against is not None:
        check_peer(finished, against)
    if as_json:
        columns = views.as_json(finished)
        if against is not None:
            columns = [{**row, **ratios} for row, ratios in zip(columns, ratio_columns(finished, against))]
        return json.dumps(columns, indent=2, allow_nan=False)
    if against is not None:
        return terminal_ratios(finished, against)
    return f"{views.terminal_verdict(finished)}\n\n{views.terminal_table(finished)}"
