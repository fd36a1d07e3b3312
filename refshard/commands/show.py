"""``refshard show``: a run's verdict and tables, for people or for programs."""

import json
from pathlib import Path

from refshard.errors import SpecError
from refshard.harness.store import read_run
from refshard.report import views
from refshard.report.columns import as_csv as csv_text
from refshard.report.ratios import RATIO_COLUMNS, check_peer, ratio_columns, terminal_ratios


def show(run: Path, *, as_json: bool, as_csv: bool = False, against: str | None = None) -> str:
    """The run in the folder ``run``: its verdict and tables; or an array with an object per case, or a line per case.

    ``against`` names the strategy that every other is compared with: ratios in a table instead, or beside each case.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: no case of the run is of the strategy ``against``; or both JSON and CSV are asked for.
    """
    if as_json and as_csv:
        raise SpecError("--csv: --json is asked for too, and there is one output; leave out either")
    finished = read_run(run)
    if against is not None:
        check_peer(finished, against)
    if as_json or as_csv:
        rows = views.as_json(finished)
        if against is not None:
            rows = [{**row, **ratios} for row, ratios in zip(rows, ratio_columns(finished, against))]
        if as_csv:
            return csv_text(rows, RATIO_COLUMNS if against is not None else ())
        return json.dumps(rows, indent=2, allow_nan=False)
    if against is not None:
        return terminal_ratios(finished, against)
    return "\n\n".join(filter(None, (views.terminal_verdict(finished), views.terminal_table(finished))))
