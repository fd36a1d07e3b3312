"""Memory snapshots as JSON and CSV, and names from anyone's files; ``scenarios`` shows the text."""

from pathlib import Path

from refshard.commands.trace import memory_snapshots
from tests.analysis.snapshots import write
from tests.report.printed import as_csv, as_json, tables, verdict
from tests.report.trace.scenarios import fragmented

KIB = 1024


def test_json_and_csv_have_the_same_sums(tmp_path: Path) -> None:
    found = memory_snapshots([write(tmp_path / "s.pickle", fragmented().snapshot())])
    ((snapshot,), (row,)) = as_json(found)["snapshots"], as_csv(found)
    (device,) = snapshot["devices"]
    assert device["reserved_bytes"] == int(row["reserved_bytes"]) == 8 * KIB
    assert device["allocated_bytes"] == int(row["allocated_bytes"]) == 4 * KIB + 512
    assert device["history"]["requested_bytes"] == int(row["peak_requested_bytes"]) == 8 * KIB
    assert device["lines"][0]["site"] == {"file": "/home/me/project/train.py", "line": 5, "function": "step"}


def test_names_that_would_steer_a_terminal_do_not(tmp_path: Path) -> None:
    snapshot = fragmented().snapshot()
    for entry in snapshot["device_traces"][0][:-1]:
        entry["frames"] = [{"filename": "/a/\x1b[2Jevil.py", "line": 1, "name": "\x1b[31m"}]
    found = memory_snapshots([write(tmp_path / "s.pickle", snapshot)])
    assert not any("\x1b" in str(cell) for one in tables(found) for row in one.rows for cell in row)
    assert "\x1b" not in " ".join(verdict(found))
