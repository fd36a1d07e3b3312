"""What is told of a CUDA memory snapshot."""

from pathlib import Path
from typing import Any

from refshard.commands.trace import memory_snapshots
from refshard.report.blocks import Answer
from tests.analysis.snapshots import Allocator, write
from tests.report.printed import as_csv, as_json, notes, tables, verdict
from tests.report.trace.scenarios import fragmented

KIB = 1024


def answer(folder: Path, allocator: Allocator, **asked: Any) -> Answer:
    return memory_snapshots([write(folder / "s.pickle", allocator.snapshot(**asked))])


def test_a_history_that_ends_before_the_snapshot_is_said_to(tmp_path: Path) -> None:
    allocator = fragmented()
    recorded = len(allocator.entries)
    allocator.free(next(part for part in allocator.segments[min(allocator.segments)] if part.line == 5))
    snapshot = allocator.snapshot()
    snapshot["device_traces"] = [trace[:recorded] for trace in snapshot["device_traces"]]
    told = notes(memory_snapshots([write(tmp_path / "s.pickle", snapshot)]))
    assert "The history ends before the snapshot was taken: 2.00 KiB that it leaves in use are not there any more." in (
        " ".join(told)
    )


def test_expandable_segments_are_advised_unless_they_are_set(tmp_path: Path) -> None:
    snapshot = fragmented().snapshot()
    assert "Try PYTORCH_CUDA_ALLOC_CONF=expandable" in verdict(answer(tmp_path, fragmented()))[1]
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    assert "Try" not in " ".join(verdict(memory_snapshots([write(tmp_path / "s.pickle", snapshot)])))


def test_out_of_memory_is_fragmentation_where_more_was_unused_than_asked_for(tmp_path: Path) -> None:
    allocator = fragmented()
    allocator.fail(3 * KIB, 100, 8)
    found = answer(tmp_path, allocator)
    assert notes(found)[-1].endswith(
        "3.00 KiB asked for at project/train.py:8, 100 B free on the device, 3.90 KiB reserved and not in use."
    )
    assert verdict(found)[-1].startswith(
        "Out of memory: 3.00 KiB were asked for while 3.90 KiB were reserved and not in use: fragmentation."
    )
    allocator.fail(1 << 20, 100, 8)
    assert verdict(answer(tmp_path, allocator))[-1] == (
        "Out of memory 2 times; the last time 1.00 MiB were asked for, and 3.90 KiB were reserved and not in use: hold "
        "less."
    )


def test_without_history_or_stacks_it_says_how_to_record_them(tmp_path: Path) -> None:
    snapshot = fragmented().snapshot(entries=0)
    for block in snapshot["segments"][0]["blocks"]:
        block["frames"] = []
    found = memory_snapshots([write(tmp_path / "s.pickle", snapshot)])
    assert verdict(found)[0] == (
        "4.50 of 8.00 KiB reserved are allocated now; no stacks were recorded: call "
        "torch.cuda.memory._record_memory_history() first."
    )


def test_what_runs_near_the_limit_of_its_memory_is_told_so(tmp_path: Path) -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.free(allocator.allocate(100, 1))
        allocator.empty_cache()
    found = notes(answer(tmp_path, allocator))
    assert found[0].endswith("taken from the device 4 times, given back 4 times; in the latter half once and 2 times.")
    assert found[1].startswith("A program that has warmed up should do neither")


def test_json_and_csv_have_the_same_sums(tmp_path: Path) -> None:
    found = answer(tmp_path, fragmented())
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
