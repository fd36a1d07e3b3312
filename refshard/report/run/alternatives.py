"""What each chart shows, in a sentence: for those who cannot see it, and for those who would rather read."""

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Setting
from refshard.quantities import format_percent
from refshard.records import METRICS
from refshard.report.run.verdict import listed
from refshard.report.run.views import format_metric, losses


def bars(setting: Setting, metric: str) -> str:
    """The range at each world size; the verdict says which leads count."""
    told = [_extremes(setting, world_size, metric) for world_size in setting.world_sizes]
    present = [sentence for sentence in told if sentence]
    if not present:
        return f"No case has a {METRICS[metric].label}."
    label = METRICS[metric].label
    return f"{label[0].upper()}{label[1:]}. {' '.join(present)}"


def _extremes(setting: Setting, world_size: int, metric: str) -> str:
    here = [case for case in setting.cases if case.ok and case.spec.world_size == world_size]
    found = {case.strategy: value for case in here if (value := case.metrics[metric]) is not None}
    if not found:
        return ""
    least, most = min(found, key=lambda name: found[name]), max(found, key=lambda name: found[name])
    lead = f"On {ranks(world_size)}:"
    if len(found) == 1:
        return f"{lead} {format_metric(metric, found[least])} ({least})."
    if found[least] == found[most]:
        return f"{lead} {format_metric(metric, found[least])} for every strategy."
    ends = (least, most) if METRICS[metric].better != "higher" else (most, least)
    best, worst = (f"{format_metric(metric, found[name])} ({name})" for name in ends)
    return f"{lead} from {best} to {worst}."


def breakdown(setting: Setting) -> str:
    """The least and the largest share of exposed communication."""
    shares = {
        case.label: share
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
        return f"{told} All equal those of one unsharded rank exactly."
    furthest = listed([name for name, parity in parities.items() if parity == largest])
    return (
        f"{told} Over the steps of the proof they differ from those of one unsharded rank by at most "
        f"{format_metric('loss_parity', largest)} of their value ({furthest})."
    )


def _span(low: float, high: float) -> str:
    ends = f"{low:.4g}", f"{high:.4g}"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
