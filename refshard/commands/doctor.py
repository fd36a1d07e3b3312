"""``refshard doctor``: what this machine is, what can run here, and what would be wrong."""

import textwrap
from collections.abc import Sequence

import msgspec

from refshard.harness.doctor.abilities import Ability, abilities
from refshard.harness.doctor.facts import Facts, gather
from refshard.harness.doctor.findings import Finding, findings
from refshard.harness.nvml import gpu_sensors
from refshard.quantities import format_bytes

_WIDTH = 118


def doctor(*, as_json: bool) -> tuple[str, int]:
    """The text to print, and the exit status: 1 if something makes measurements wrong or impossible, else 0."""
    with gpu_sensors() as sensors:
        facts = gather(sensors)
    return report(facts, as_json=as_json)


def report(facts: Facts, *, as_json: bool) -> tuple[str, int]:
    """The text to print about a machine of these facts, and the exit status."""
    found, can = findings(facts), abilities(facts)
    status = int(any(finding.severity == "error" for finding in found))
    return (_json(facts, can, found) if as_json else text(facts, can, found)), status


def _json(facts: Facts, can: Sequence[Ability], found: Sequence[Finding]) -> str:
    packed = msgspec.json.encode({"facts": facts, "abilities": can, "findings": found})
    return msgspec.json.format(packed, indent=2).decode()


def text(facts: Facts, can: Sequence[Ability], found: Sequence[Finding]) -> str:
    """What a person reads, or pastes into a bug report."""
    return "\n".join(
        [
            f"refshard {facts.refshard}, torch {facts.torch.version}, Python {facts.python}",
            "",
            "This machine",
            *_lines([(label, value) for label, value in machine(facts) if value]),
            "",
            "What can run here",
            *_lines([(one.name, f"{'yes: ' if one.possible else 'no: '}{one.about}") for one in can]),
            "",
            *_found(found),
        ]
    )


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
    return f"torch sees none; NVIDIA's here: {there}" if there else "none"


def _each(facts: Facts, setting: str, unit: str) -> str:
    """A setting of all GPUs, once if they agree."""
    values = [_words(getattr(gpu.settings, setting), unit) for gpu in facts.gpus]
    if len(set(values)) == 1:
        return values[0]
    return "; ".join(f"GPU {gpu}: {value}" for gpu, value in enumerate(values))


def _words(value: object, unit: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} to {end}" for end, count in value.items()) or "none"
    return "unknown" if value is None else f"{value:g}{unit}"


def _found(found: Sequence[Finding]) -> list[str]:
    if not found:
        return ["Nothing found that is wrong."]
    rows = [(one.severity, f"{one.says}\nTo correct it: {one.remedy}") for one in found]
    return ["What is wrong, or good to know", *_lines(rows)]


def _lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Labels in one column, and what belongs to them wrapped in the next."""
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, value in rows:
        parts = [line for part in value.split("\n") for line in textwrap.wrap(part, _WIDTH - width - 4)]
        lines += [f"  {label if not number else '':{width}}  {part}" for number, part in enumerate(parts or [""])]
    return lines
