"""``--explain-oom``: snapshots of real runs against dry runs of the same script, both on the fake device."""

import pickle
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from refshard.commands.dryrun import Options, dryrun
from refshard.dryrun.analyse import Analysis, analyse
from refshard.dryrun.explain import Explanation, explain, read_real_run
from refshard.dryrun.recording import Category
from refshard.dryrun.request import request_on
from refshard.dryrun.run import dry_run
from refshard.errors import SpecError, TraceError
from refshard.quantities import GIB, MIB
from refshard.report.blocks import Answer
from refshard.report.dryrun.explain import explained_answer
from refshard.specs.cluster import load_cluster
from tests.analysis.snapshots import Allocator, write
from tests.dryrun import oom
from tests.fakecuda.needs import needs_device
from tests.report.printed import verdict

pytestmark = [needs_device, pytest.mark.processes, pytest.mark.slow]
FORWARD = f"train.py:{oom.line('return self.down')} in forward"
EVALUATED = f"train.py:{oom.line('2**28')} in train"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """A dry run of the script as it is."""
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(oom.SCRIPT)
    request = request_on("dgx-h100", 1, command=(str(path),), rank_variables=False, sites=True)
    return analyse(dry_run(request, quiet=True), load_cluster("dgx-h100").of_world_size(1))


@pytest.fixture(scope="module")
def leak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oom.fail(tmp_path_factory.mktemp("leak"), "--leak")


def explained(path: Path, found: Analysis) -> tuple[Explanation, Answer]:
    real = read_real_run(path)
    explanation = explain(real, found)
    return explanation, explained_answer(real, found, explanation, None)


def held(explanation: Explanation, category: Category | None) -> tuple[int, int]:
    """Bytes of a purpose in the real run, and at the dry run's peak."""
    mine = [part for part in explanation.parts if part.category == category]
    return sum(part.bytes for part in mine), sum(part.predicted_bytes for part in mine)


def test_a_leak_is_a_line_with_more_blocks_than_the_dry_run_ever_has(leak: Path, found: Analysis) -> None:
    explanation, answer = explained(leak, found)
    (one,) = explanation.departures
    # The last block's output of each step is kept, 4 x 16384 x 4096 floats, and four others are alive in forward.
    assert (one.kind, one.line, one.largest, one.module) == ("more", FORWARD, GIB, "*.down")
    assert (one.category, one.blocks, one.predicted_blocks, one.grows) == (Category.ACTIVATIONS, 43, 5, 0)
    assert explanation.scale is None
    assert held(explanation, Category.PARAMETERS) == (2 * GIB, 2 * GIB)
    assert held(explanation, Category.OPTIMIZER)[0] == 4 * GIB + 8 * 4
    assert sum(part.bytes for part in explanation.parts) == explanation.held_bytes
    first, cause, *_, last = verdict(answer)
    assert first.startswith(f"Out of memory at me/train.py:{oom.line('.backward()')}: 4.00 GiB were asked for")
    assert cause.startswith(
        f"{FORWARD} holds 43 blocks of 1.00 GiB (activations in *.down, 43.0 GiB); the dry run at most 5."
    )
    assert last.startswith("Dry run, without that: FITS: peak reserved 39.0 GiB of 78.4 GiB usable")


def test_a_leak_that_the_dry_run_has_too_grows_there_by_the_step(leak: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(oom.SCRIPT)
    command = (str(tmp_path / "train.py"), "--leak")
    request = request_on("dgx-h100", 1, command=command, rank_variables=False, sites=True)
    run = analyse(dry_run(request, quiet=True), load_cluster("dgx-h100").of_world_size(1))
    (one,) = explained(leak, run)[0].departures
    assert (one.kind, one.line, one.grows) == ("more", FORWARD, 1)
    assert one.predicted_blocks < one.blocks


def test_a_larger_batch_makes_blocks_larger_by_one_factor(tmp_path: Path, found: Analysis) -> None:
    explanation, answer = explained(oom.fail(tmp_path, "--batch", "10"), found)
    assert explanation.scale == 2.5
    assert {one.kind for one in explanation.departures} == {"larger"}
    largest = explanation.departures[0]
    assert (largest.line, largest.largest, largest.predicted_largest) == (FORWARD, 10 * GIB, 4 * GIB)
    assert "are 2.5 times as large as the dry run's" in verdict(answer)[1]


def test_a_line_that_the_dry_run_does_not_pass_is_named(tmp_path: Path, found: Analysis) -> None:
    explanation, answer = explained(oom.fail(tmp_path, "--evaluate"), found)
    (one,) = explanation.departures
    assert (one.kind, one.line, one.largest, one.category) == ("new", EVALUATED, GIB, None)
    assert held(explanation, None) == (one.bytes, 0)
    assert verdict(answer)[1].startswith(f"{one.blocks}.0 GiB are held at 1 line where the dry run allocates nothing")


def test_another_process_holds_what_is_neither_free_nor_reserved(tmp_path: Path, found: Analysis) -> None:
    """The script itself, refused by a limit at half of the GPU, of which nothing is free."""
    script = oom.SCRIPT.replace("try:", "torch.cuda.set_per_process_memory_fraction(0.4)\ntry:")
    explanation, answer = explained(oom.fail(tmp_path, free_bytes=0, script=script), found)
    real = read_real_run(tmp_path / "oom.pickle")
    assert real.failed is not None
    assert explanation.outside_bytes == found.hardware.memory_bytes - real.failed.reserved_bytes
    over = explanation.outside_bytes - found.outside_bytes
    assert over > 40 * GIB
    assert any(f"{over / GIB:.1f} GiB more than the estimate for CUDA's context" in text for text in departs(answer))


def departs(answer: Answer) -> list[str]:
    return list(answer.data["explanation"]["departs"])


def test_the_snapshot_of_another_script_is_not_compared(tmp_path: Path, found: Analysis) -> None:
    allocator = Allocator()
    allocator.allocate(3 * MIB, 7)
    explanation, answer = explained(write(tmp_path / "s.pickle", allocator.snapshot()), found)
    assert (explanation.matched, explanation.parts, explanation.departures) == (0, (), ())
    assert departs(answer) == [
        "Not compared: only 0 % of the snapshot's memory was allocated at lines of this script. Dry-run the script "
        "that wrote the snapshot, unchanged."
    ]


def without_stacks() -> dict[str, Any]:
    allocator = Allocator()
    allocator.allocate(3 * MIB, 7)
    snapshot = allocator.snapshot()
    for part in (*snapshot["device_traces"][0], *snapshot["segments"][0]["blocks"]):
        part["frames"] = []
    return snapshot


@cache
def unusable() -> Mapping[str, tuple[bytes, str]]:
    bare = without_stacks()
    whole = pickle.dumps(bare)
    return {
        "no pickle": (b"{}", r"s\.pickle: is no pickle; write a snapshot with torch\.cuda\.memory\._dump_snapshot"),
        "truncated": (whole[:-20], r"s\.pickle: damaged pickle \(.*\); copy or write it again"),
        "no stacks": (whole, r"history has no stacks, so nothing tells which lines allocated memory; call .* defaults"),
        "no history": (
            pickle.dumps({**bare, "device_traces": []}), r"has no recorded history, .* before the model is made"
        ),
        "no memory": (pickle.dumps({"segments": []}), "holds no memory of a GPU"),
    }  # fmt: skip


@pytest.mark.parametrize("which", unusable())
def test_a_file_that_cannot_explain_says_so_in_a_sentence(tmp_path: Path, which: str) -> None:
    content, message = unusable()[which]
    (tmp_path / "s.pickle").write_bytes(content)
    options = Options(words=("train.py",), cluster="dgx-h100", gpus=1, explain_oom=tmp_path / "s.pickle")
    with pytest.raises(TraceError, match=message):
        dryrun(options)


def test_the_command_explains_and_keeps_the_dry_runs_status(leak: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(oom.SCRIPT)
    options = Options(words=("python", str(tmp_path / "train.py")), cluster="dgx-h100", gpus=1, explain_oom=leak)
    answer = dryrun(options, html=tmp_path / "page.html")
    assert (answer.status, answer.data["fits"]) == (0, True)
    assert answer.data["explanation"]["departures"][0]["blocks"] == 43
    assert "Where the real run departs from the dry run" in (tmp_path / "page.html").read_text()


def test_several_ranks_are_not_explained(tmp_path: Path) -> None:
    options = Options(words=("train.py",), cluster="dgx-h100", ranks="all", explain_oom=tmp_path / "s.pickle")
    with pytest.raises(SpecError, match="--explain-oom explains one run; leave out --ranks"):
        dryrun(options)


def test_memory_from_before_the_history_has_no_line_and_is_no_departure(leak: Path, found: Analysis) -> None:
    """The history begins after the model was made and its optimizer had stepped."""
    with leak.open("rb") as file:
        snapshot = pickle.load(file)
    entries = snapshot["device_traces"][0]
    middle = len(entries) // 2
    early = {one["addr"] for one in entries[:middle] if one["action"] == "alloc"}
    late = {one["addr"] for one in entries[middle:] if one["action"] == "alloc"}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [] if block["address"] in early - late else block["frames"]
    path = write(leak.with_name("late.pickle"), {**snapshot, "device_traces": [entries[middle:]]})
    explanation, answer = explained(path, found)
    assert all(one.line for one in explanation.departures)
    assert held(explanation, None)[0] >= 6 * GIB
    assert any("were there before the history began" in text for text in departs(answer))
