"""Races of real programs on the fake device: what is right has none, and each wait that is taken away shows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refshard.dryrun.races import Conflict, find_races
from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.request import Request
from refshard.dryrun.run import dry_run
from tests.dryrun import scripts
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.full]

PREFETCHES = """
import torch

side, host = torch.cuda.Stream(), torch.ones(512, 1024, pin_memory=True)
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def copied():
    with torch.cuda.stream(side):
        return host.to("cuda", non_blocking=True)

following = copied()
while True:
    torch.cuda.current_stream().wait_stream(side)
    batch = following
    {record}
    model(batch).sum().backward()
    batch = None
    following = copied()
    optimizer.step()
"""
"""The usual prefetcher of batches. Without ``record_stream`` a copy may overwrite a batch that backward still reads."""


COMPILED = """
import torch

side, weight = torch.cuda.Stream(), torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=1e-3)
doubled = torch.compile(lambda x: torch.relu(x) * 2)
while True:
    batch = torch.randn(1024, 1024, device="cuda")
    {wait}
    with torch.cuda.stream(side):
        made = doubled(batch)
    torch.cuda.current_stream().wait_stream(side)
    (weight * made.detach()).sum().backward()
    optimizer.step()
"""
"""A generated kernel on another stream reads what the current stream writes."""


def recorded(folder: Path, script: str, world_size: int = 1) -> Recording:
    path = folder / "train.py"
    path.write_text(script)
    request = Request(command=(str(path),), cluster="dgx-h100", world_size=world_size, local_ranks=world_size)
    run = dry_run(request)
    assert run.answer.outcome == "stepped", run.answer.error
    return run.recording


def without(recording: Recording, row: int) -> Recording:
    """The same, but nothing waits in this row."""
    kinds = recording.kinds.copy()
    kinds[row] = Kind.MARK
    return replace(recording, kinds=kinds)


def test_a_prefetcher_must_tell_the_allocator_who_reads_the_batch(tmp_path: Path) -> None:
    tells = PREFETCHES.format(record="batch.record_stream(torch.cuda.current_stream())")
    assert find_races(recorded(tmp_path, tells)) == ()
    found = find_races(recorded(tmp_path, PREFETCHES.format(record="")))
    assert {(race.conflict, race.earlier.operator, race.earlier.stream, race.later.operator) for race in found} == {
        (Conflict.REUSE, "aten::addmm", 0, "aten::copy_"),
        (Conflict.REUSE, "aten::mm", 0, "aten::copy_"),
    }


def test_generated_kernels_must_wait_for_what_they_read(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert find_races(recorded(tmp_path, COMPILED.format(wait="side.wait_stream(torch.cuda.current_stream())"))) == ()
    found = find_races(recorded(tmp_path, COMPILED.format(wait="pass")))
    assert any(
        race.conflict == Conflict.READ_WRITE and "inductor::triton_poi_fused_mul_relu_0" in str(race) for race in found
    )


def waits(recording: Recording, before: set[int], after: set[int]) -> list[int]:
    """Rows in which one of some streams waits for one of others."""
    recorded_on: dict[int, int] = {}
    rows = []
    for row in np.flatnonzero(np.isin(recording.kinds, (Kind.RECORD, Kind.WAIT))).tolist():
        event, stream = int(recording.subjects[row]), int(recording.streams[row])
        if recording.kinds[row] == Kind.RECORD:
            recorded_on[event] = stream
        elif recorded_on[event] in before and stream in after:
            rows.append(row)
    return rows


def test_fsdp2_has_no_race_and_one_without_any_wait_for_parameters_or_gradients(tmp_path: Path) -> None:
    recording = recorded(tmp_path, scripts.TRAIN, world_size=8)
    assert find_races(recording) == ()
    names = np.array(recording.name_table)[recording.names]
    gathers, reduces = (set(recording.streams[names == name].tolist()) for name in ("all_gather", "reduce_scatter"))
    for_parameters, for_gradients = waits(recording, gathers, {0}), waits(recording, {0}, reduces)
    # Each of four units, in three steps: gathered for forward and for backward, and reduced.
    assert (len(for_parameters), len(for_gradients)) == (3 * 8, 3 * 4)
    assert all(find_races(without(recording, row)) for row in for_parameters + for_gradients)
