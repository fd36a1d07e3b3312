"""Device memory outside the allocator: by GPU, and by what NCCL was asked for."""

import json
from pathlib import Path
from statistics import median

import pytest

from refshard.dryrun.overheads import overheads
from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.quantities import GIB, MIB
from refshard.specs.hardware import load_hardware
from tests.dryrun.made import Made

MESSAGES = Path(__file__).parents[2] / "validation" / "outside_memory.json"
OUTSIDE = Path(__file__).parents[2] / "profiles" / "recorded" / "h200" / "outside.json"


def test_a_context_takes_what_public_messages_of_one_gpu_show() -> None:
    """Every other message was fitted; the rest is held out."""
    rows = [row for row in json.loads(MESSAGES.read_text()) if row["kind"] == "one GPU"]
    outside = {row["source"]: row["in_use_gib"] - row["allocated_gib"] - row["unallocated_gib"] for row in rows}
    a800 = outside.pop("modelscope/ms-swift#6675")
    assert context(load_hardware("a100-sxm-80gb")).bytes == pytest.approx(a800 * GIB, abs=0.005 * GIB)
    fitted, held_out = [*outside.values()][::2], [*outside.values()][1::2]
    estimate = context(load_hardware("rtx-4090")).bytes / GIB
    assert estimate == pytest.approx(median(fitted), abs=0.001)
    assert [round(estimate - one, 2) for one in held_out] == [-0.01, 0.05, -0.07]


def test_an_h200_and_gpus_of_which_nothing_is_known_take_what_was_measured() -> None:
    stages = {row["stage"]: round((row["used"] - row["reserved"]) / MIB) for row in json.loads(OUTSIDE.read_text())}
    measured = stages["AdamW foreach"]
    assert context(load_hardware("h200-sxm")).bytes == measured * MIB
    assert context(load_hardware("b200")).bytes == measured * MIB
    assert "not known for this GPU" in context(load_hardware("b200")).source
    first, further = (stages["NCCL initialised"] - measured, stages["NCCL group 2"] - stages["NCCL initialised"])
    assert (first * MIB, further * MIB) == COMMUNICATOR_BYTES


def test_communicators_are_counted_with_their_groups() -> None:
    hardware, made = load_hardware("h100-sxm-80gb"), Made()
    assert overheads(hardware, made.recording()) == (context(hardware),)
    world, pipeline = made.group(range(8)), made.group([0, 1])
    for group, size in ((world, 558), (pipeline, 390), (pipeline, 390)):
        made.communicator(group, size * MIB)
    _, nccl = overheads(hardware, made.recording())
    assert (nccl.name, nccl.bytes) == ("3 NCCL communicators", 1338 * MIB)
    assert nccl.source.startswith("of 2 process groups; ")
