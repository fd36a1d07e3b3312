"""``refshard show``: a run's verdict and tables, for people or for programs."""

import json
from pathlib import Path

from refshard.analysis.evidence import gather
from refshard.analysis.ratios import RATIO_COLUMNS, ratio_columns
from refshard.errors import SpecError
from refshard.harness.store import read_run
from refshard.report.run import markdown, views
from refshard.report.run.columns import as_csv as csv_text
from refshard.report.run.ratios import check_peer, terminal_ratios


def show(
    run: Path, *, as_json: bool, as_csv: bool = False, as_markdown: bool = False, against: str | None = None
) -> str:
    """The run in the folder ``run``: its verdict and tables, for a terminal or in Markdown; or an array with an object
    per case, or a line per case.

    ``against`` names the strategy that every other is compared with: ratios in a table instead, or beside each case.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: no case of the run is of the strategy ``against``; or more than one output is asked for.
    """
    asked = {"--json": as_json, "--csv": as_csv, "--markdown": as_markdown}
    if len(forms := [option for option, is_asked in asked.items() if is_asked]) > 1:
        raise SpecError(f"{forms[1]}: {forms[0]} is asked for too, and there is one output; leave out either")
    if as_markdown and against is not None:
        raise SpecError("--markdown: it shows the verdict and its tables; leave out --against, or --markdown")
    found = gather(read_run(run))
    if against is not None:
        check_peer(found, against)
    if as_json or as_csv:
        rows = views.as_json(found)
        if against is not None:
            rows = [{**row, **ratios} for row, ratios in zip(rows, ratio_columns(found, against))]
        if as_csv:
            return csv_text(rows, RATIO_COLUMNS if against is not None else ())
        return json.dumps(rows, indent=2, allow_nan=False)
    if as_markdown:
        return markdown.as_markdown(found)
    if against is not None:
        return terminal_ratios(found, against)
    return "\n\n".join(filter(None, (views.terminal_verdict(found), views.terminal_table(found))))
