"""``refshard doctor``: what this machine is, what can run here, and what would be wrong."""

from collections.abc import Sequence

import msgspec

from refshard.measure.doctor import Ability, Facts, Finding, abilities, findings, gather
from refshard.measure.nvml import gpu_sensors
from refshard.quantities import format_bytes
from refshard.report.blocks import Answer, Cell, Column, Marked, Style, Table, Text, Verdict

_SEVERITY: dict[str, Style] = {"error": "bad", "warning": "doubtful"}


def doctor() -> Answer:
    """What this machine is and can do; the status is 1 if something makes measurements wrong or impossible."""
    with gpu_sensors() as sensors:
        facts = gather(sensors)
    return report(facts)


def report(facts: Facts) -> Answer:
    """The answer about a machine of these facts."""
    found, can = findings(facts), abilities(facts)
    errors = sum(finding.severity == "error" for finding in found)
    data = msgspec.json.decode(msgspec.json.encode({"facts": facts, "abilities": can, "findings": found}))
    return Answer(
        data=data,
        rows=data["findings"],
        columns=("severity", "says", "remedy"),
        blocks=[
            Text(text=f"refshard {facts.refshard}, torch {facts.torch.version}, Python {facts.python}"),
            Table(
                columns=[Column("this machine", "left"), Column("", "left", wraps=True)],
                rows=[(label, value) for label, value in machine(facts) if value],
            ),
            _can(can),
            _found(found),
            _verdict(found, errors),
        ],
        status=1 if errors else 0,
    )


def _verdict(found: Sequence[Finding], errors: int) -> Verdict:
    if errors:
        words = "1 finding makes" if errors == 1 else f"{errors} findings make"
        return Verdict(sentences=[f"{words} measurements wrong or impossible here."], style="bad")
    if any(one.severity == "warning" for one in found):
        return Verdict(sentences=["This machine can measure; see the warnings above."], style="doubtful")
    return Verdict(sentences=["This machine can measure. Nothing is wrong."], style="good")


def _can(can: Sequence[Ability]) -> Table:
    columns = [Column("what", "left"), Column("runs here", "left"), Column("how", "left", wraps=True)]
    rows: list[list[Cell]] = [
        [one.name, Marked("yes", "good") if one.possible else Marked("no", "doubtful"), one.about] for one in can
    ]
    return Table(columns=columns, rows=rows)


def machine(facts: Facts) -> list[tuple[str, str]]:
    """The machine as label and value."""
    limits = {"open files": facts.open_files, "locked memory": facts.locked_bytes}
    gpus = [f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in facts.torch.gpus]
    software = [f"driver {facts.driver}" if facts.driver else "", facts.torch.toolkit]
    return [
        ("system", facts.os),
        ("processor", f"{facts.cpu}, {facts.physical_cores} cores; {facts.cores} logical cores for this process"),
        ("memory", f"{format_bytes(facts.memory_bytes)}; /dev/shm {format_bytes(facts.shm_bytes)}"),
        ("other work", f"{facts.busy_cores:.1f} of {facts.cores} cores"),
        ("limits", ", ".join(f"{name} {'unlimited' if most is None else most}" for name, most in limits.items())),
        ("GPUs", "; ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or _unseen(facts)),
        ("GPU software", ", ".join(filter(None, software))),
        ("power limits", _each(facts, "power_limit_w", " W")),
        ("NVLinks", _each(facts, "nvlinks", "")),
        ("variables", ", ".join(f"{name}={value}" for name, value in facts.variables.items())),
    ]


def _unseen(facts: Facts) -> str:
    there = max(facts.pci_gpus, len(facts.gpus))
    return f"torch sees none; NVIDIA GPUs present: {there}" if there else "none"


def _each(facts: Facts, setting: str, unit: str) -> str:
    """A setting of all GPUs, once if they agree."""
    values = [_setting_text(getattr(gpu.settings, setting), unit) for gpu in facts.gpus]
    if len(set(values)) == 1:
        return values[0]
    return "; ".join(f"GPU {gpu}: {value}" for gpu, value in enumerate(values))


def _setting_text(value: object, unit: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} to {end}" for end, count in value.items()) or "none"
    return "unknown" if value is None else f"{value:g}{unit}"


def _found(found: Sequence[Finding]) -> Table:
    columns = [Column("finding", "left"), Column("what is wrong, and the remedy", "left", wraps=True)]
    rows: list[list[Cell]] = [
        [Marked(one.severity, _SEVERITY.get(one.severity, "plain")), f"{one.says}\nRemedy: {one.remedy}"]
        for one in found
    ]
    return Table(columns=columns, rows=rows)
