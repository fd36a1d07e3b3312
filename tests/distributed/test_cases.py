"""What people do to models: every mode trains like one unsharded process, or says in one sentence why it cannot.

``make test`` runs the cases that stand for rows of the table that the corpus was written for, each in one mode and
variant (an evaluation first, blocks checkpointed), so that each mode meets each variant. ``make full`` runs these in
every mode, on three ranks too, and all other cases in two modes each. ``python -m tests.distributed.cases`` runs every
case in every mode and variant, and prints how each ends.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from refshard.engine.placement import MODES
from tests.distributed.cases import deliberate, fsdp2
from tests.distributed.cases.case import ALL, PLAIN, Case
from tests.distributed.cases.corpus import CASES
from tests.distributed.cases.run import FSDP2, Outcome, Run, difference, run_all, run_bare

pytestmark = pytest.mark.processes

TABLE = [case for case in CASES.values() if case.table]
ENDS_IN_FSDP2 = [case for case in TABLE if fsdp2.expected(case.name) != "hang"]
"""The others would take minutes each."""


def _spread(cases: Sequence[Case], world_size: int) -> list[Run]:
    """Every case in every mode once; variants take turns over cases, modes and world sizes."""
    return [
        Run(case.name, mode, case.variants[(row + column + world_size) % len(case.variants)])
        for row, case in enumerate(cases)
        for column, mode in enumerate(case.modes)
    ]


def _every(world_size: int) -> list[Run]:
    """The table's cases in every mode; on two ranks the others too, in two modes each, by turns."""
    table = _spread(TABLE, world_size)
    if world_size > 2:
        return table
    others = _spread([case for case in CASES.values() if not case.table], world_size)
    return table + [run for place, run in enumerate(others) if place % 5 in (place // 5 % 5, (place // 5 + 2) % 5)]


def _cover() -> list[Run]:
    """Of the table's runs on two ranks one for each case, in another mode than the case before."""
    runs = {(run.case, run.way): run for run in _spread(TABLE, 2)}
    return [runs[case.name, case.modes[(row + row // 5) % len(case.modes)]] for row, case in enumerate(TABLE)]


COVER = _cover()
Launch = Callable[[str, int], dict[Run, Outcome]]


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest) -> Launch:
    """The outcomes of a selection of runs, launched once per world size. The cover is a part of every run."""
    every = any(getattr(item, "function", None) is test_case_on_two_ranks for item in request.session.items)

    @functools.cache
    def launched(selection: str, world_size: int) -> dict[Run, Outcome]:
        if selection == FSDP2:
            runs = [Run(case.name, FSDP2, PLAIN[0]) for case in ENDS_IN_FSDP2]
        else:
            runs = COVER if selection == "cover" else _every(world_size)
        return run_all(world_size, runs, collective_s=300, run_s=900)  # on a busy machine, ranks meet late

    def found(selection: str, world_size: int) -> dict[Run, Outcome]:
        outcomes = launched("every" if every and selection == "cover" else selection, world_size)
        return {run: outcomes[run] for run in COVER} if selection == "cover" else outcomes

    return found


def _surprises(case: Case, outcomes: dict[Run, Outcome]) -> list[str]:
    """What no mode may do, a line for each."""
    return [
        f"{run.way}, {run.variant.name}: {outcome.kind}: {outcome.message}"
        for run, outcome in outcomes.items()
        if run.case == case.name and not case.accepts(run.way, outcome.kind, outcome.message)
    ]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_case_of_the_table(case: Case, launch: Launch) -> None:
    assert not _surprises(case, launch("cover", 2))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_case_on_two_ranks(case: Case, launch: Launch) -> None:
    assert not _surprises(case, launch("every", 2))


@pytest.mark.full
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_case_on_three_ranks(case: Case, launch: Launch) -> None:
    assert not _surprises(case, launch("every", 3))


@pytest.mark.full
@pytest.mark.parametrize("case", ENDS_IN_FSDP2, ids=lambda case: case.name)
def test_fsdp2_ends_as_the_case_says(case: Case, launch: Launch) -> None:
    outcome = launch(FSDP2, 2)[Run(case.name, FSDP2, PLAIN[0])]
    assert outcome.kind == fsdp2.expected(case.name), outcome.message


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_every_case_runs_unsharded_and_reports_something(tmp_path: Path) -> None:
    for case in CASES.values():
        assert run_bare(case, case.variants[0], tmp_path / case.name), case.name


def test_the_cover_holds_each_case_and_each_variant_in_each_mode() -> None:
    assert set(COVER) < set(_every(2))
    assert [run.case for run in COVER] == [case.name for case in TABLE]
    assert {(run.way, run.variant) for run in COVER} == {(mode, variant) for mode in MODES for variant in ALL}
    met = {(run.case, run.way) for run in _every(2)}
    assert met >= {(case.name, mode) for case in TABLE for mode in case.modes}


@pytest.mark.full
def test_bad_ends_are_told_apart_and_cost_no_other_case_its_result() -> None:
    names = [name for name in deliberate.CASES if name not in ("never_ends", "races")]
    runs = [Run(name, mode, PLAIN[0]) for name in [*names, "is_right"] for mode in ("fsdp", "zero1")]
    outcomes = run_all(2, runs, collective_s=15)
    assert {(run.case, outcome.kind) for run, outcome in outcomes.items()} == {
        ("is_right", "right"),
        ("is_wrong_on_one_rank", "wrong"),
        ("dies_on_one_rank", "crash"),
        ("waits_for_nobody_on_one_rank", "hang"),
        ("raises_on_one_rank", "obscure"),
        ("is_refused", "refused"),
    }
    messages = {run.case: outcome.message for run, outcome in outcomes.items()}
    assert messages["dies_on_one_rank"].startswith("SIGSEGV")
    assert "in dies_on_one_rank" in messages["dies_on_one_rank"]
    assert messages["raises_on_one_rank"] == "KeyError: 'the cause'"
    assert messages["is_refused"] == "EngineError: for a reason"
    assert messages["is_wrong_on_one_rank"].startswith("rank: off by")


@pytest.mark.full
def test_a_run_that_never_ends_is_given_up() -> None:
    runs = [Run(name, "fsdp", PLAIN[0]) for name in ("never_ends", "is_right")]
    outcomes = run_all(2, runs, run_s=30)
    assert [outcomes[run].kind for run in runs] == ["hang", "right"]
    assert "in never_ends" in outcomes[runs[0]].message  # the ranks' stacks


def test_differences_are_named_and_measured() -> None:
    expected = [("a", torch.tensor([1.0, 0.0])), ("b", torch.tensor(2.0))]
    assert difference(expected, expected, 0.0) == ""
    assert difference([("a", torch.tensor([1.0, 1e-9])), expected[1]], expected, 1e-8) == ""
    assert difference([("a", torch.tensor([1.0, 0.1])), expected[1]], expected, 1e-8) == (
        "a: off by 1.0e-01 of its largest value"
    )
    assert "off by nan" in difference([expected[0], ("b", torch.tensor(float("nan")))], expected, 1e-8)
    assert difference([("a", torch.ones(3)), expected[1]], expected, 1e-8) == "a: shape (3,), not (2,)"
    assert difference(expected[:1], expected, 1e-8) == "logged 'nothing' where 'b' was due"
