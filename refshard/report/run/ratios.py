"""Ratios to one strategy as tables, for a terminal and for a page."""

import pandas as pd
from tabulate import tabulate

from refshard.analysis.cases import plain
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.ratios import Ratio, ratios
from refshard.errors import SpecError, nearest
from refshard.report.run.intervals import ratio_text


def pair_rows(evidence: Evidence) -> pd.DataFrame:
    """Every strategy beside the first one, as text: what a page shows before its reader chooses."""
    if not evidence.strategies:
        return pd.DataFrame()
    every = (ratio for setting in evidence.contested for ratio in ratios(setting, evidence.strategies[0]))
    return pd.DataFrame(
        [
            {
                "case": ratio.case.full_label,
                "beside": evidence.strategies[0],
                "step time ratio": _time(ratio),
                "peak memory ratio": _times(ratio.peak_memory),
            }
            for ratio in every
        ]
    )


def check_peer(evidence: Evidence, peer: str) -> None:
    """Check that the run has a case of the strategy ``peer``.

    Raises:
        SpecError: it has none.
    """
    present = sorted({case.strategy for case in evidence.cases})
    if not present:
        raise SpecError(f"--against: this run has no case yet, so none of strategy '{peer}'; leave it out, or wait")
    if peer not in present:
        raise SpecError(f"--against: this run has no case of strategy '{peer}'; {nearest(peer, present)}")


def terminal_ratios(evidence: Evidence, peer: str) -> str:
    """A table per setting in which ``peer`` has an equal to be compared with, or a sentence if there is none."""
    tables = [_table(setting, peer) for setting in evidence.settings]
    nothing = f"* Nothing to compare: no other case ended ok beside one of {peer} that did, with as many ranks."
    return "\n\n".join(table for table in tables if table) or nothing


def _table(setting: Setting, peer: str) -> str:
    found = ratios(setting, peer)
    rows = [
        (ratio.case.strategy, ratio.case.spec.world_size, _time(ratio), _times(ratio.peak_memory)) for ratio in found
    ]
    if not rows:
        return ""
    paired = "\npaired by round" if all(r.step_time is None or r.step_time.paired for r in found) else ""
    headers = [
        "strategy", "ranks", f"step time / {peer}'s{paired}\n(95 % interval)", f"peak memory\n/ {peer}'s{paired}"
    ]  # fmt: skip
    table = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=["left", *["right"] * 3])
    return f"{plain(setting.label)}\n\n{table}"


def _time(ratio: Ratio) -> str:
    return "-" if ratio.step_time is None else ratio_text(ratio.step_time)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
