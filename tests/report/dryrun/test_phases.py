"""A dry run's answer by phase: the sentence that leads, the table, JSON, and no verdict without the phases."""

from typing import Any

import pytest

from refshard.dryrun.recording import BEGINS, Category, Phase
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.page import as_page
from tests.dryrun.made import Made
from tests.dryrun.test_phases import GIB, rounds
from tests.report import printed
from tests.report.dryruns import analysed
from tests.report.pages import Page

NAMES = ("generate", "train", "evaluate")
LEAD = (
    "The peak is in generate (occurrence 2 of 2): 20.0 GiB allocated, of which 12.0 GiB carried over: 8.00 GiB "
    "optimizer state from train, 4.00 GiB parameters from outside of phases."
)


def trained() -> Made:
    made = rounds()
    made.phase = Phase.OPTIMIZER
    made.launch("aten::_fused_adamw_", writes=GIB)
    made.mark()
    return made


def test_the_verdict_names_the_phase_with_the_peak_and_what_it_carries_over() -> None:
    found = analysed(trained(), phases=NAMES)
    answer = dryrun_answer(found)
    assert printed.verdict(answer)[1] == LEAD
    text = printed.text(answer)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("evaluate  ")]
    assert row[:10] == ["evaluate", "1", "13.0", "GiB", "20.0", "GiB", "12.0", "GiB", "0", "B"]
    assert (
        "* evaluate allocates at most 13.0 GiB of 20.0 GiB reserved: the rest was in the allocator's cache before, "
        "most of it from generate."
    ) in " ".join(text.split())
    data: Any = answer.data["phases"]
    assert (data["peak_in"], data["unreached"]) == ("generate", ())
    assert [one["name"] for one in data["phases"]] == [*NAMES, None]
    first, *_ = data["phases"][0]["entries"]
    assert first == {
        "category": "optimizer", "made_in": "train", "carried": True, "place": "", "bytes": 8 * GIB, "blocks": 1,
    }  # fmt: skip
    seen = Page("".join(as_page(answer, product="dryrun", command="refshard dryrun"))).text
    assert LEAD in " ".join(seen.replace("\N{NO-BREAK SPACE}", " ").split())
    assert "Memory by phase" in seen


def test_a_peak_outside_of_the_phases_is_said_to_be_there() -> None:
    made = Made()
    made.free(made.allocate(9 * GIB))
    with made.within("train"):
        made.phase = Phase.OPTIMIZER
        made.launch("aten::mm", writes=GIB)
        made.free(made.allocate(GIB))
    verdict = printed.verdict(dryrun_answer(analysed(made, phases=("train",))))
    assert verdict[1] == "The peak is outside of the phases: 9.00 GiB allocated."


def test_a_script_without_an_optimizer_fits_if_its_phases_do() -> None:
    made = Made()
    made.allocate(GIB, Category.PARAMETERS)
    with made.within("generate"):
        made.launch("aten::mm", writes=GIB)
        made.free(made.allocate(GIB))
    given: dict[str, Any] = {"outcome": "ended", "steps_taken": 0, "tokens": 0}
    answer = dryrun_answer(analysed(made, phases=("generate",), **given))
    assert answer.status == 0
    assert printed.verdict(answer)[0].startswith("FITS: peak reserved 20.0 GiB")
    assert dryrun_answer(analysed(made, **given)).status == 3
    on_the_cpu = Made()
    with on_the_cpu.within("generate"):
        on_the_cpu.mark("other")
    assert (
        "nothing was launched" in printed.verdict(dryrun_answer(analysed(on_the_cpu, phases=("generate",), **given)))[0]
    )


@pytest.mark.parametrize(
    ("given", "told", "why", "remedy"),
    [
        (
            {"phases": ("generate", "evalute")}, {"ranges": ("log", "evaluate", "generate")},
            "no phase 'evalute' in 2 optimizer steps",
            "The script annotates evaluate, generate, log, train: name one of these, or put what you want to account "
            'into torch.profiler.record_function("evalute") or an NVTX range. If it comes later, add --until-phase '
            "evalute.",
        ),
        (
            {"until_phase": "save"}, {"ranges": ()}, "no phase 'save' in 2 optimizer steps",
            "The script annotates evaluate, generate, train: name one of these, or put what you want to account into "
            'torch.profiler.record_function("save") or an NVTX range. If it comes later, raise --steps.',
        ),
        (
            {"until_phase": "generate:5"}, {"outcome": "ended"},
            "phase 'generate' did not end 5 times in 2 optimizer steps", "Let the script run for longer.",
        ),
    ],
)  # fmt: skip
def test_there_is_no_verdict_without_a_phase_that_is_named(
    given: dict[str, Any], told: dict[str, Any], why: str, remedy: str
) -> None:
    answer = dryrun_answer(analysed(trained(), **given, **told))
    assert printed.verdict(answer) == [f"NO VERDICT: {why}; peak reserved 20.0 GiB", remedy]
    data: Any = answer.data
    assert (answer.status, data["fits"], data["no_verdict"]) == (3, None, why)


def test_a_script_that_annotates_nothing_is_told_how_to() -> None:
    answer = dryrun_answer(analysed(phases=("train",), outcome="ended"))
    assert printed.verdict(answer)[1] == (
        'Put what you want to account into torch.profiler.record_function("train") or an NVTX range.'
    )


def test_a_phase_that_the_limit_of_steps_cuts_off_has_its_peak() -> None:
    made = trained()
    made.mark(BEGINS + "score")
    made.allocate(GIB)
    answer = dryrun_answer(analysed(made, phases=("score",)))
    assert answer.status == 0
    assert answer.data["phases"]["phases"][-2]["kept_bytes"] is None
