"""What is told of a CUDA memory snapshot."""

from pathlib import Path
from typing import Any

from refshard.commands.memory_snapshot import memory_snapshots
from refshard.report.blocks import Answer
from tests.analysis.snapshots import Allocator, write
from tests.report.printed import as_csv, as_json, notes, rows, tables, verdict

KIB = 1024


def answer(folder: Path, allocator: Allocator, **asked: Any) -> Answer:
    return memory_snapshots([write(folder / "s.pickle", allocator.snapshot(**asked))])


def fragmented() -> Allocator:
    """Four blocks of 2 KiB at line 5 fill a segment; every other one is freed; 100 bytes at line 6."""
    allocator = Allocator()
    blocks = [allocator.allocate(2 * KIB, 5) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(100, 6)
    return allocator


def test_tables_say_where_reserved_memory_is_and_who_holds_the_peak(tmp_path: Path) -> None:
    sums, pools, lines = tables(answer(tmp_path, fragmented()), detail=False)
    told = {row["memory"]: (row["now"], row["at the peak"]) for row in rows(sums)}
    assert told == {
        "asked for": ("4.10 KiB", "8.00 KiB"), "rounding": ("412 B", "-"), "waiting for a stream": ("0 B", "0 B"),
        "free, in segments in use": ("3.50 KiB", "-"), "free, in unused segments": ("0 B", "-"),
        "reserved": ("8.00 KiB", "8.00 KiB"), "largest free block": ("2.00 KiB", "-"),
    }  # fmt: skip
    assert [(row["pool"], row["segments"], row["reserved"]) for row in rows(pools)] == [("small", "1", "8.00 KiB")]
    assert rows(lines) == [
        {"line": "project/train.py:5", "function": "step", "asked for": "8.00 KiB", "share": "100.0 %", "blocks": "4"}
    ]
    (sizes,) = tables(answer(tmp_path, fragmented()), detail=True)
    assert rows(sizes) == [{"block size": "2,048 B", "blocks": "4", "together": "8.00 KiB"}]


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


def test_the_verdict_names_the_line_and_what_to_do_about_fragmentation(tmp_path: Path) -> None:
    assert verdict(answer(tmp_path, fragmented())) == [
        "Peak: 8.00 of 8.00 KiB reserved were in use; project/train.py:5 holds most (100 %).",
        "Fragmentation: 3.50 KiB (44 %) are free, in segments that are in use. "
        "Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ]
    snapshot = fragmented().snapshot()
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    found = memory_snapshots([write(tmp_path / "s.pickle", snapshot)])
    assert "Try" not in " ".join(verdict(found)), "it is set already"


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
