"""Scripts made after public reports of hangs: how many a dry run of all ranks finds, and why not the others."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from refshard.analysis.mismatch import Fault
from tests.dryrun.test_command import run
from tests.fakecuda.needs import needs_device

FOLDER = Path("docs/examples/hangs")


class Report(NamedTuple):
    """On how many GPUs a script hangs, how it shows in a dry run (None: it does not), and why it does not."""

    gpus: int
    fault: Fault | None
    why: str = ""


REPORTS = {
    "barrier_on_main": Report(2, Fault.DIFFERS),
    "batch_without_images": Report(2, Fault.DIFFERS),
    "clip_returns_early": Report(2, Fault.DIFFERS),
    "conditional_collective": Report(8, Fault.DIFFERS),
    "different_keys": Report(2, Fault.DIFFERS),
    "early_stopping": Report(2, None, "values: it depends on losses, which a dry run does not compute"),
    "evaluation_on_main": Report(2, Fault.DIFFERS),
    "experts_without_tokens": Report(2, None, "values: an assumption routes the tokens, the same on all ranks"),
    "gather_object_on_main": Report(2, Fault.DIFFERS),
    "gather_on_main": Report(2, Fault.DIFFERS),
    "gradients_of_some": Report(2, Fault.DIFFERS),
    "groups_of_own": Report(4, Fault.GROUP),
    "head_called_unequally": Report(2, Fault.DIFFERS),
    "interleaved_isend": Report(2, Fault.DEADLOCK),
    "no_sync_by_rank": Report(2, Fault.DIFFERS),
    "pipeline_sends": Report(2, Fault.DEADLOCK),
    "property_on_main": Report(2, Fault.DIFFERS),
    "send_first": Report(2, Fault.DEADLOCK),
    "sizes_differ": Report(2, Fault.DIFFERS),
    "skip_connection": Report(3, None, "library: NCCL waits while it connects two ranks for their first message"),
    "skipped_backward": Report(2, Fault.MISSING),
    "slow_save": Report(2, None, "time: the calls match, one comes later than the timeout"),
    "state_dict_on_main": Report(2, Fault.DIFFERS),
    "uneven_batches": Report(4, Fault.MISSING),
    "uneven_validation": Report(2, Fault.DIFFERS),
}
FOUND = {name: one for name, one in REPORTS.items() if one.fault is not None}
"""21 of 25."""


def dry_run_all(folder: Path, script: str, gpus: int, *options: str) -> dict[str, Any]:
    done = run(folder, script, "--json", "--ranks", "all", "--gpus", str(gpus), *options)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    failed = any(one["outcome"] == "failed" for one in found["ranks"]["by_rank"])
    assert done.returncode == (1 if found["ranks"]["mismatches"] or failed else 0 if found["fits"] else 3), done.stderr
    return found


def test_every_script_names_its_report_and_most_are_found() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == REPORTS.keys()
    for name in REPORTS:
        assert "https://github.com/" in (FOLDER / f"{name}.py").read_text().split('"""')[1]
    assert (len(REPORTS), len(FOUND)) == (25, 21)
    assert all(one.why for name, one in REPORTS.items() if name not in FOUND)


@needs_device
@pytest.mark.processes
def test_both_places_of_a_mismatch_are_named(tmp_path: Path) -> None:
    script = (FOLDER / "conditional_collective.py").read_text()
    found = dry_run_all(tmp_path, script, 8)["ranks"]
    lines = [line.strip() for line in script.splitlines()]
    inner, outer = (lines.index(line) + 1 for line in ("dist.all_reduce(loss)", "log(step, loss.detach())"))
    (one,) = found["mismatches"]
    assert [side["ranks"] for side in one["sides"]] == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert [side["call"]["op"] for side in one["sides"]] == ["all_reduce", "all_gather"]
    assert one["sides"][0]["call"]["places"] == [f"train.py:{inner} in log", f"train.py:{outer} in <module>"]
    assert (one["step"], one["hangs"], found["hangs"]) == (2, True, True)


@needs_device
@pytest.mark.full
@pytest.mark.parametrize("name", REPORTS)
def test_reports_of_hangs(tmp_path: Path, name: str) -> None:
    gpus, fault, _ = REPORTS[name]
    found = dry_run_all(tmp_path, (FOLDER / f"{name}.py").read_text(), gpus)["ranks"]
    assert [one["fault"] for one in found["mismatches"]] == ([] if fault is None else [fault]), found["mismatches"]
    assert all(rank["outcome"] in ("stepped", "ended") for rank in found["by_rank"])


AGREES = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
batches = torch.tensor([3 - rank], device="cuda")
dist.all_reduce(batches, op=dist.ReduceOp.MIN)
settings = [{"width": 96} if rank == 0 else None]
dist.broadcast_object_list(settings, src=0)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, "a" * (1 + 50 * rank))
assert [len(name) for name in names] == [1, 51]
model = DistributedDataParallel(nn.Linear(settings[0]["width"], 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(batches.item()):
    model(torch.ones(8 * (1 + rank), 96, device="cuda")).mean().backward()
    optimizer.step()
"""
"""Ranks have different data, and agree on how much of it to use: no hang. Rank 1 has larger batches."""


@needs_device
@pytest.mark.processes
def test_values_that_ranks_send_each_other_are_real(tmp_path: Path) -> None:
    found = dry_run_all(tmp_path, AGREES, 2)
    ranks = found["ranks"]
    assert ranks["mismatches"] == []
    assert [(one["outcome"], one["steps_taken"]) for one in ranks["by_rank"]] == [("ended", 2)] * 2
    assert ranks["unsettled"] == []
    peaks = [one["peak_allocated_bytes"] for one in ranks["by_rank"]]
    assert peaks[1] > peaks[0]
    assert (ranks["largest"], found["request"]["rank"], found["peak_allocated_bytes"]) == (1, 1, peaks[1])


@needs_device
@pytest.mark.full
@pytest.mark.parametrize(("name", "gpus"), [("train_fsdp2", 8), ("train_tp_fsdp2", 16)])
def test_right_scripts_have_no_mismatch(tmp_path: Path, name: str, gpus: int) -> None:
    for one in ("train_fsdp2", name):
        text = re.sub(r"--layers(.*)default=\d+", r"--layers\1default=2", Path(f"docs/examples/{one}.py").read_text())
        (tmp_path / f"{one}.py").write_text(text)
    found = dry_run_all(tmp_path, text, gpus, "--cluster", "dgx-h100x2", "--ranks", "distinct", "--steps", "2")
    assert found["ranks"]["mismatches"] == []
    assert found["ranks"]["collectives"] > 50


PIPELINE = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
place = mesh["pp"].get_local_rank()
part = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
for layer in part:
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(part, mesh=mesh["dp"])
example = torch.ones(4, 64, device="cuda")
shapes = {
    "input_args": (example.clone().requires_grad_(place > 0),), "output_args": (example.clone().requires_grad_(),)
}
stage = PipelineStage(part, place, 2, torch.device("cuda"), group=mesh["pp"].get_group(), **shapes)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
batch = torch.ones(16, 64, device="cuda")
for _ in range(4):
    if place == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)
    nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
"""Two stages of two ranks each, 1F1B and FSDP2."""


@needs_device
@pytest.mark.full
def test_a_pipeline_has_no_mismatch(tmp_path: Path) -> None:
    found = dry_run_all(tmp_path, PIPELINE, 4)["ranks"]
    assert found["mismatches"] == []
    assert [one["outcome"] for one in found["by_rank"]] == ["stepped"] * 4
