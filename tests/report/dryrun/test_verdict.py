"""No verdict without an optimizer step that had work on the GPU: the text, the page, JSON and the status agree."""

from typing import Any

import pytest

from refshard.dryrun.recording import Category, Flag, Phase
from refshard.dryrun.request import OtherSegments, Pool
from refshard.report.blocks import Facts
from refshard.report.dryrun.answer import dryrun_answer, sentences
from refshard.report.page import as_page
from tests.dryrun.made import Made
from tests.report import printed
from tests.report.dryruns import GIB, MIB, analysed


def inference(phase: Phase = Phase.FORWARD) -> Made:
    made = Made()
    made.segment(GIB)
    made.allocate(GIB, Category.PARAMETERS)
    made.phase, made.module = phase, "layers.0"
    made.launch("aten::mm", writes=GIB)
    return made


def on_the_cpu() -> Made:
    """Two steps; the first copies something to the GPU, as scripts do to report."""
    made = Made()
    made.launch("aten::zero_", writes=8)
    made.mark()
    made.launch("aten::zero_", writes=8)
    made.mark()
    return made


UNANSWERED = [
    (Made(), 0, "no optimizer step ran, and nothing was launched on the GPU"),
    (inference(), 0, "no optimizer step ran, and no backward (1 launches on the GPU)"),
    (inference(Phase.BACKWARD), 0, "backward ran (1 launches on the GPU), but no optimizer step did"),
    (on_the_cpu(), 2, "2 optimizer steps ran, but nothing of their forward, backward or update is on the GPU"),
]


@pytest.mark.parametrize(("made", "steps", "says"), UNANSWERED)
def test_without_a_step_on_the_gpu_there_is_no_verdict(made: Made, steps: int, says: str) -> None:
    found = analysed(made, outcome="ended", steps_taken=steps, tokens=0)
    answer = dryrun_answer(found)
    verdict = printed.verdict(answer)
    assert verdict[0] == f"NO VERDICT: {says}; peak reserved 20.0 GiB"
    assert len(verdict) == 2  # and what to do
    data: Any = answer.data
    assert (answer.status, data["fits"], data["no_verdict"]) == (3, None, says)
    text = "".join(as_page(answer, product="dryrun", command="refshard dryrun"))
    assert "NO VERDICT" in text
    assert "FITS" not in text
    (facts,) = [block for block in answer.blocks if isinstance(block, Facts)]
    assert facts.facts[0].value == "20.0 GiB reserved"


def test_a_step_on_the_gpu_is_enough() -> None:
    made = inference(Phase.OPTIMIZER)
    made.mark()
    answer = dryrun_answer(analysed(made, steps_taken=1))
    data: Any = answer.data
    assert (answer.status, data["fits"], data["no_verdict"]) == (0, True, None)


@pytest.mark.parametrize(
    ("outcome", "says"), [("stepped", "Try: --steps 3."), ("ended", "Try: let the script train for more steps.")]
)
def test_a_single_step_says_that_later_ones_may_need_more(outcome: str, says: str) -> None:
    made = inference(Phase.OPTIMIZER)
    made.mark()
    (said,) = [one for one in sentences(analysed(made, outcome=outcome, steps_taken=1)) if "one optimizer" in one]
    assert said.endswith(f"later steps may need more memory. {says}")
    assert not [one for one in sentences(analysed()) if "Only one" in one]


def test_memory_that_ran_out_is_a_verdict_before_any_step() -> None:
    answer = dryrun_answer(analysed(inference(), outcome="oom", error="CUDA out of memory.", steps_taken=0, tokens=0))
    data: Any = answer.data
    assert (answer.status, data["fits"], data["no_verdict"]) == (1, False, None)


def test_a_script_that_failed_neither_fits_nor_lacks_a_verdict() -> None:
    answer = dryrun_answer(analysed(outcome="failed", error="ValueError: no", where="train.py:9 in main"))
    data: Any = answer.data
    assert (answer.status, data["fits"], data["no_verdict"]) == (1, None, None)
    assert printed.verdict(answer) == ["FAILED: ValueError: no", "at train.py:9 in main"]


def test_every_line_that_read_a_value_that_was_not_computed_is_named() -> None:
    """Also outside the last step, such as a loss that is printed at the first."""
    made = Made()
    for site in ("train.py:31 in train", "train.py:31 in train", "train.py:9 in log"):
        made.synchronise(why="item", site=site, flags=Flag.VALUE_UNKNOWN)
    made.synchronise(why="item", site="train.py:40 in train")
    made.phase = Phase.BACKWARD
    for _ in range(2):
        made.launch("aten::mm", writes=GIB)
        made.mark()
    (said,) = [one for one in sentences(analysed(made)) if "does not compute" in one]
    assert said.startswith("Values that a dry run does not compute were read 3 times and are placeholders: ")
    assert said.endswith("Where: train.py:31 in train, train.py:9 in log.")


def test_the_value_that_failed_a_check_is_named() -> None:
    failed = analysed(outcome="failed", error="AssertionError: assert loss > 1", where="a.py:9", blamed="a.py:8")
    assert printed.verdict(dryrun_answer(failed))[-1] == (
        "Probably because a.py:8 reads a value that a dry run does not compute: it gets a placeholder. Leave the check "
        "out of a dry run."
    )


def test_nvidia_smi_shows_what_is_outside_the_allocator_too() -> None:
    data: Any = dryrun_answer(analysed()).data
    assert data["nvidia_smi_bytes"] == 20 * GIB + (767 + 558) * MIB  # CUDA's context, and a communicator of NCCL
    assert "nvidia-smi: 21.3 GiB at the peak" in printed.text(dryrun_answer(analysed()))
    oom: Any = dryrun_answer(analysed(outcome="oom", error="CUDA out of memory.")).data
    assert oom["nvidia_smi_bytes"] is None


def fragmented(*, expandable: bool, other: int = 5) -> list[str]:
    peak = Pool(allocated=GIB, active=GIB, reserved=20 * GIB, requested=GIB)
    found = analysed(peak=peak, other_segments=OtherSegments(expandable=expandable, reserved=other * GIB, fits=True))
    return [one for one in sentences(found) if one.startswith("Fragmentation")]


def test_both_settings_of_the_allocator_are_shown_with_their_peaks() -> None:
    other = OtherSegments(expandable=True, reserved=90 * GIB, fits=False)
    text = printed.text(dryrun_answer(analysed(other_segments=other)), verbose=True)
    assert "no                       20.0 GiB            fits" in text
    assert "yes                      90.0 GiB    does not fit" in text


def test_fragmentation_says_what_the_other_setting_reserves() -> None:
    (found,) = fragmented(expandable=True)
    assert found.endswith("With PYTORCH_ALLOC_CONF=expandable_segments:True: 5.00 GiB reserved.")
    assert fragmented(expandable=False) == []  # it is set already
