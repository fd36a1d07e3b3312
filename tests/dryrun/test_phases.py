"""Memory of the phases that a script annotates: recordings made by hand, and a script that measures itself."""

import json
from pathlib import Path

import pytest

from refshard.dryrun.memory import account_memory
from refshard.dryrun.phases import OUTSIDE, PhaseMemory, account_phases
from refshard.dryrun.recording import BEGINS, Category
from refshard.dryrun.request import read_until, request_on
from refshard.dryrun.run import DryRun, dry_run
from refshard.dryrun.trials import Trial
from tests.dryrun.made import Made
from tests.fakecuda.needs import needs_device

GIB = 2**30
EXAMPLE = Path("docs/examples/rl_phases.py").resolve()


def rounds() -> Made:
    """Two rounds of generate and train, and evaluate: 4 GiB of parameters, and what each phase adds."""
    made = Made()
    made.segment(4 * GIB)
    made.allocate(4 * GIB, Category.PARAMETERS)
    for number in range(2):
        with made.within("generate"):
            made.segment((8, 4)[number] * GIB)
            cache = made.allocate(6 * GIB, Category.ACTIVATIONS)
            made.free(made.allocate(2 * GIB, Category.WORKSPACE))
            made.free(cache)
        with made.within("train"):
            gradients = made.allocate(4 * GIB, Category.GRADIENTS)
            if not number:
                made.segment(4 * GIB)
                made.allocate(8 * GIB, Category.OPTIMIZER)
            made.free(gradients)
        made.mark()
    with made.within("evaluate"):
        made.free(made.allocate(GIB, Category.ACTIVATIONS))
    return made


def phases_of(made: Made) -> dict[str, PhaseMemory]:
    recording = made.recording()
    return {one.name: one for one in account_phases(recording, account_memory(recording))}


def carried(phase: PhaseMemory) -> list[tuple[Category, str, int]]:
    """What its peak found there: purpose, the phase that made it, and GiB."""
    return [(one.category, one.made_in, one.bytes // GIB) for one in phase.entries if one.carried]


def test_each_phase_has_its_peak_and_what_it_found_and_left() -> None:
    found = phases_of(rounds())
    assert list(found) == ["generate", "train", "evaluate", OUTSIDE]
    figures = {
        name: [(r.begin_bytes // GIB, r.peak_bytes // GIB, (r.end_bytes or 0) // GIB, (r.kept_bytes or 0) // GIB)
               for r in one.ranges]
        for name, one in found.items() if name
    }  # fmt: skip
    assert figures == {
        "generate": [(4, 12, 4, 0), (12, 20, 12, 0)],
        "train": [(4, 16, 12, 8), (12, 16, 12, 0)],
        "evaluate": [(12, 13, 12, 0)],
    }
    assert found["generate"].highest.number == 2
    assert carried(found["generate"]) == [(Category.OPTIMIZER, "train", 8), (Category.PARAMETERS, OUTSIDE, 4)]
    assert found["train"].highest.number == 1
    assert carried(found["train"]) == [(Category.PARAMETERS, OUTSIDE, 4)]
    assert found["train"].by_category() == {
        Category.OPTIMIZER: 8 * GIB, Category.PARAMETERS: 4 * GIB, Category.GRADIENTS: 4 * GIB,
    }  # fmt: skip
    assert [one.kept_bytes for one in found.values()] == [0, 8 * GIB, 0, 4 * GIB]
    # Before the first phase, and around the marks of the two steps.
    assert [(one.begin_bytes // GIB, one.peak_bytes // GIB) for one in found[OUTSIDE].ranges] == [
        (0, 4), (12, 12), (12, 12),
    ]  # fmt: skip


def test_reserved_memory_that_a_phase_does_not_need_is_the_earlier_ones() -> None:
    found = phases_of(rounds())
    reserved = {name: one.peak_reserved_bytes // GIB for name, one in found.items() if name}
    assert reserved == {"generate": 20, "train": 20, "evaluate": 20}
    # From 16 to 20 GiB generate has it; of what evaluate does not need, 3 GiB are train's.
    assert {name: one.cached_since for name, one in found.items() if name} == {
        "generate": None, "train": "generate", "evaluate": "generate",
    }  # fmt: skip


def test_what_was_given_back_in_between_is_not_inherited() -> None:
    made = Made()
    with made.within("generate"):
        made.segment(8 * GIB)
        made.free(made.allocate(8 * GIB))
    made.segment(-8 * GIB)
    with made.within("score"):
        made.segment(4 * GIB)
        made.free(made.allocate(4 * GIB))
    with made.within("train"):
        made.free(made.allocate(GIB))
    found = phases_of(made)
    assert (found["train"].peak_reserved_bytes, found["train"].cached_since) == (4 * GIB, "score")
    assert found["score"].cached_since is None


def test_memory_is_made_in_the_innermost_range_and_counts_for_all() -> None:
    made = Made()
    with made.within("train"):
        made.allocate(GIB)
        with made.within("evaluate"):
            kept = made.allocate(2 * GIB)
    with made.within("save"):
        made.allocate(GIB)
        made.free(kept)
    found = phases_of(made)
    assert {name: one.highest.peak_bytes // GIB for name, one in found.items()} == {
        "train": 3,
        "evaluate": 3,
        "save": 4,
    }
    assert carried(found["evaluate"]) == [(Category.OTHER, "train", 1)]
    assert carried(found["save"]) == [(Category.OTHER, "evaluate", 2), (Category.OTHER, "train", 1)]
    assert (found["train"].kept_bytes, found["evaluate"].kept_bytes) == (3 * GIB, 2 * GIB)


def test_a_phase_that_the_run_cuts_off_has_a_peak_and_keeps_nothing_known() -> None:
    made = Made()
    made.mark(BEGINS + "train")
    made.allocate(2 * GIB)
    (found,) = phases_of(made).values()
    assert (found.highest.peak_bytes, found.highest.end_bytes, found.kept_bytes) == (2 * GIB, None, None)


def test_without_ranges_there_are_no_phases() -> None:
    made = Made()
    made.allocate(GIB)
    made.mark()
    assert phases_of(made) == {}


@pytest.mark.parametrize("text", ["", " ", ":2", "train:0"])
def test_a_phase_to_stop_at_must_have_a_name_and_a_number_from_1(text: str) -> None:
    with pytest.raises(ValueError, match=f"until-phase must be a phase.*, got '{text}'"):
        read_until(text)


MEASURES = f"""
import contextlib, json, sys
import torch
from torch.profiler import record_function
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import rl_phases

@contextlib.contextmanager
def measured(name):
    with record_function(name):
        torch.cuda.reset_peak_memory_stats()
        began = torch.cuda.memory_allocated()
        yield
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(json.dumps([name, began, *peaks, torch.cuda.memory_allocated()]), flush=True)

rl_phases.record_function = measured
rl_phases.main()
"""


@needs_device
@pytest.mark.processes
@pytest.mark.slow
def test_the_figures_of_each_phase_are_those_that_the_script_measures(tmp_path: Path) -> None:
    """To the byte, allocated and reserved."""
    (tmp_path / "measures.py").write_text(MEASURES)
    sizes = ("--layers", "2", "--new-tokens", "8", "--checkpoint", str(tmp_path / "checkpoint"))
    request = request_on(
        "dgx-h100", 8, command=(str(tmp_path / "measures.py"), *sizes), until_phase="save", steps=9,
        phases=("generate", "score", "train", "evaluate"),
    )  # fmt: skip
    run = dry_run(request, quiet=True)
    assert (run.answer.outcome, run.answer.steps_taken) == ("stepped", 2), run.output
    printed = [json.loads(line) for line in run.output.splitlines() if line.startswith("[")]
    assert [name for name, *_ in printed] == ["generate", "score", "train"] * 2 + ["evaluate", "save"]
    found = Trial(request=request).analyse(run)
    ranges = sorted((one for phase in found.phases if phase.name for one in phase.ranges), key=lambda one: one.first)
    assert printed == [
        [one.name, one.begin_bytes, one.peak_bytes, one.peak_reserved_bytes, one.end_bytes] for one in ranges
    ]
    assert found.fits
    cache, *_ = (one for one in found.phases[-2].entries if one.made_in == "generate" and one.carried)
    assert (found.phases[-2].name, cache.place.rpartition(" ")[2]) == ("save", "main")
    assert cache.bytes == 2 * 2 * 2 * 128 * 4 * (1024 + 8) * 128  # keys and values of two layers in bf16


def run_of(folder: Path, script: str, **given: object) -> DryRun:
    (folder / "script.py").write_text(script)
    command = (str(folder / "script.py"),)
    return dry_run(request_on("dgx-h100", 1, command=command, rank_variables=False, **given), quiet=True)


GENERATES = """
import torch
from torch.autograd.profiler import record_function
from torch.cuda import nvtx

@record_function("score")
def score(size):
    return torch.empty(size, device="cuda").zero_()

for number in range(1, 100):
    with nvtx.range("{}", "generate"):
        nvtx.range_push("inner")
        kept = score(number * 2**20)
        nvtx.range_pop()
        with record_function("generate"):
            torch.empty(2**22, device="cuda").zero_()
    if number == 2:
        try:
            with record_function("generate"):
                raise ValueError
        except ValueError:
            pass
"""


@needs_device
@pytest.mark.processes
def test_ranges_of_nvtx_and_decorators_count_and_end_a_run_without_an_optimizer(tmp_path: Path) -> None:
    run = run_of(tmp_path, GENERATES, phases=("score",), until_phase="generate:3")
    assert run.answer.outcome == "stepped", run.output
    assert run.answer.ranges == ("generate", "inner", "score")
    found = Trial(request=run.request).analyse(run)
    generate, scored = found.phases[:2]
    # The third ended by an error, which does not count; one within itself is no other occurrence.
    assert [one.peak_bytes // 2**20 for one in generate.ranges] == [4 + 16, 8 + 16, 8, 12 + 16]
    assert [one.peak_bytes // 2**20 for one in scored.ranges] == [4, 12, 20]
    assert found.fits
