"""Cases that real GPUs measured, beside dry runs of them: what ``profiles/recorded`` has of ``make gpu-quick``."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from refshard import resources
from refshard.quantities import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCase:
    """One figure of one case: medians over its launches, in GiB or in seconds.

    Constants of step times were fitted to the half ``fit``; nothing of memory was.
    """

    machine: str
    name: str
    half: Literal["fit", "held out"]
    figure: Literal["reserved", "step time"]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was measured."""
        return self.predicted / self.measured - 1


def recorded_cases() -> list[RecordedCase]:
    """All of them, by machine and name."""
    folders = sorted(path.parent for path in (resources.root() / "profiles" / "recorded").glob("*/predicted.jsonl"))
    return [case for folder in folders for case in _of_machine(folder)]


def _of_machine(folder: Path) -> Iterator[RecordedCase]:
    launches = defaultdict(list)
    for file in sorted(folder.glob("cases-*.jsonl")):
        for row in _rows(file):
            if "peak" in row:
                launches[row["name"]].append((row["peak"]["reserved"] / GIB, row["step_s"]))
    for row in _rows(folder / "predicted.jsonl"):
        if row["step_s"] is None or row["name"] not in launches:
            continue
        reserved, step_s = (median(values) for values in zip(*launches[row["name"]]))
        for figure, measured, predicted in (
            ("reserved", reserved, row["peak"]["reserved"] / GIB), ("step time", step_s, row["step_s"]),
        ):  # fmt: skip
            yield RecordedCase(
                machine=folder.name, name=row["name"], half=row["half"], figure=figure,  # type: ignore[arg-type]
                measured=measured, predicted=predicted,
            )  # fmt: skip


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
