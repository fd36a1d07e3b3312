"""Memory timelines of torch's profiler, against sums on paper."""

import gzip
import json
from pathlib import Path

import pytest

from refshard.analysis.snapshot import MemoryTimelineFigures, is_memory_timeline, memory_timeline
from refshard.commands.trace import memory_timelines, trace
from refshard.errors import TraceError
from tests.report.printed import as_csv, as_json, rows, tables, verdict

PARAMETERS, INPUTS, TEMPORARY, ACTIVATIONS = 0, 2, 3, 4
ROWS = [
    [-1, 1, 100, PARAMETERS], [1000, 2, 50, INPUTS], [3000, 2, 200, ACTIVATIONS], [3000, 3, -50, INPUTS],
    [3000, 3, 50, TEMPORARY], [4000, 4, -200, ACTIVATIONS], [4000, 2, 190, TEMPORARY],
]  # fmt: skip


def written(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_the_peak_by_category(tmp_path: Path) -> None:
    wanted = MemoryTimelineFigures(
        events=7, peak_bytes=350, peak_ns=2000, before_bytes=100,
        by_category={"parameters": 100, "temporary": 50, "activations": 200},
    )  # fmt: skip
    for name in ("t.raw.json.gz", "t.json"):
        path = written(tmp_path / name, json.dumps(ROWS))
        assert is_memory_timeline(path)
        assert memory_timeline(path) == wanted


def test_what_is_said_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "t.raw.json.gz", json.dumps(ROWS))
    found = trace([path])
    assert verdict(found) == ["Peak: 350 B, 2.00 us after the first event; most is activations (57 %)."]
    assert [row["held for"] for row in rows(tables(found)[0])] == ["activations", "parameters", "temporary"]
    assert as_json(found)["memory_timelines"][0]["peak_bytes"] == 350
    assert sum(int(row["bytes"]) for row in as_csv(found)) == 350
    assert as_json(memory_timelines([path])) == as_json(found)


@pytest.mark.parametrize(
    "text", ["[[1, 2, 3]]", "[[1, 2, 3, 99]]", "[[1, 2", '[["a"]]', "[[1, 2, 99999999999999999999, 3]]"]
)
def test_what_is_no_timeline_says_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="no memory timeline"):
        memory_timeline(written(tmp_path / "t.json", text))


def test_a_trace_is_none(tmp_path: Path) -> None:
    for text in ('[{"ph": "X"}]', '{"traceEvents": []}', ""):
        assert not is_memory_timeline(written(tmp_path / "t.json", text))
    assert not is_memory_timeline(tmp_path)
