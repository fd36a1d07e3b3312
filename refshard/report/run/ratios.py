"""Ratios to one strategy as a table, for a page."""

import pandas as pd

from refshard.analysis.evidence import Evidence
from refshard.analysis.ratios import Ratio, ratios
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


def _time(ratio: Ratio) -> str:
    return "-" if ratio.step_time is None else ratio_text(ratio.step_time)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
