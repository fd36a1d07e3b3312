"""Charts in words."""

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Setting
from refshard.quantities import format_percent
from refshard.report.run.verdict import listed
from refshard.report.run.views import format_metric, losses


def breakdown(setting: Setting) -> str:
    """The least and the largest share of exposed communication."""
    shares = {
        case.strategy: share
        for case in setting.cases
        if case.ok and _communicates(case) and (share := case.exposed_share) is not None
    }
    if not shares:
        return "No case with communication has a traced step."
    least, most = min(shares, key=lambda name: shares[name]), max(shares, key=lambda name: shares[name])
    if len(shares) == 1:
        return f"Exposed communication takes {format_percent(shares[least])} of a traced step of {least}."
    return (
        f"Exposed communication takes from {format_percent(shares[least])} of a traced step ({least}) "
        f"to {format_percent(shares[most])} ({most})."
    )


def _communicates(case: CaseResult) -> bool:
    return bool(case.metrics["comm_s"])


def curves(setting: Setting) -> str:
    """Where the losses start and end, and how far they are from those of one unsharded rank."""
    table = losses(setting)
    if table.empty:
        return "No case has losses."
    first = table.bfill().iloc[0]
    last = table.ffill().iloc[-1]
    count = f"{len(table.columns)} loss curves go" if len(table.columns) > 1 else "The loss goes"
    ends = f"from {_span(first.min(), first.max())} to {_span(last.min(), last.max())}"
    told = f"{count} {ends} in {len(table)} steps."
    parities = {c.label: p for c in setting.cases if c.ok and (p := c.metrics["loss_parity"]) is not None}
    if not parities:
        return told
    largest = max(parities.values())
    if largest == 0:
        return f"{told} All equal those of one unsharded rank."
    furthest = listed([name for name, parity in parities.items() if parity == largest])
    return (
        f"{told} In the proof of run they differ from one unsharded rank by at most "
        f"{format_metric('loss_parity', largest)} ({furthest})."
    )


def _span(low: float, high: float) -> str:
    ends = f"{low:.4g}", f"{high:.4g}"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
