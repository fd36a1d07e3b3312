"""Snapshots of scripts that run out of the fake GPU's memory, in torch's format.

The fake device's own snapshots have segments and no history. The history is made from the recording of the same run.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.request import Answer, request_on
from refshard.dryrun.run import _run
from refshard.quantities import GIB, MIB

SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--leak", action="store_true")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--snapshot")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4096, 16384, bias=False)
        self.down = nn.Linear(16384, 4096, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def train():
    kept = []
    for step in range(1000):
        output = model(torch.ones(options.batch, 16384, 4096, device="cuda"))
        output.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.leak:
            kept.append(output)
        if options.evaluate:
            kept.append(torch.empty(2**28, device="cuda"))


torch.cuda.memory._record_memory_history()
torch._C._cuda_attach_out_of_memory_observer(lambda *_: None)
model = nn.Sequential(*(Block() for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
try:
    train()
except torch.OutOfMemoryError:
    torch.cuda.memory._dump_snapshot(options.snapshot)
    raise
"""
"""Of each block a batch keeps 1 GiB for each of its own sequences, and 0.25 GiB of its output."""


def line(text: str, script: str = SCRIPT) -> int:
    """The number of the line of a script that holds a text."""
    (found,) = (number for number, one in enumerate(script.splitlines(), 1) if text in one)
    return found


def fail(folder: Path, *options: str, free_bytes: int | None = None, script: str = SCRIPT) -> Path:
    """The snapshot of a run of the script, which runs out of memory. ``free_bytes`` of the GPU are free then, by
    default what the device says.
    """
    (folder / "train.py").write_text(script)
    path = folder / "oom.pickle"
    command = (str(folder / "train.py"), *options, "--snapshot", str(path))
    request = request_on("dgx-h100", 1, command=command, steps=10**6, rank_variables=False, sites=True)
    run = _run(request, quiet=True)
    assert run.answer.outcome == "oom", run.answer
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    path.write_bytes(pickle.dumps(with_history(snapshot, run.recording, run.answer, free_bytes, folder)))
    return path


def with_history(
    snapshot: dict[str, Any], recording: Recording, answer: Answer, free_bytes: int | None, folder: Path
) -> dict[str, Any]:
    """The snapshot with what torch records: a stack for each allocation, and the one that failed."""
    requested, frames, entries = dict[int, int](), dict[int, list[dict[str, Any]]](), list[dict[str, Any]]()
    made = np.flatnonzero(np.isin(recording.kinds, (Kind.ALLOCATE, Kind.SEGMENT)))
    for row, kind in enumerate(recording.kinds.tolist()):
        block, address = int(recording.subjects[row]), int(recording.reads[row])
        if kind == Kind.ALLOCATE:
            requested[block] = int(recording.writes[row])
            frames[address] = _frames(recording.site_table[recording.sites[row]], folder)
            entries.append(_entry("alloc", address, requested[block], frames[address]))
        elif kind == Kind.FREE:
            entries += [
                _entry(action, address, requested[block], []) for action in ("free_requested", "free_completed")
            ]
        elif kind == Kind.SEGMENT:
            size = int(recording.sizes[row])
            entries.append(_entry("segment_alloc" if size > 0 else "segment_free", 0, abs(size), []))
        if row == made[-1]:
            failed = _frames(answer.where.removeprefix("at "), folder)
            free = _bytes(answer.error, r"of which (\S+) (\w+) is free") if free_bytes is None else free_bytes
            asked = _bytes(answer.error, r"Tried to allocate (\S+) (\w+)")
            entries.append({**_entry("oom", 0, asked, failed), "device_free": free, "addr": None})
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = frames.get(block["address"], [])
    return {**snapshot, "device_traces": [entries]}


def _entry(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": frames}


def _frames(site: str, folder: Path) -> list[dict[str, Any]]:
    """A stack as torch has it; in autograd's own thread it has no Python."""
    torch = {"filename": "CUDACachingAllocator.cpp", "line": 0, "name": "malloc"}
    found = re.fullmatch(r"(.*):(\d+) in (.*)", site)
    if found is None:
        return [torch]
    return [torch, {"filename": f"/home/me/{Path(found[1]).name}", "line": int(found[2]), "name": found[3]}]


def _bytes(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(float(found[1]) * {"GiB": GIB, "MiB": MIB, "KiB": 1024, "bytes": 1}[found[2]])
