"""The cases of a suite, launched as `refshard run` launches them: a benchmark a launch, a round a step.

A sample is the time of one step, the maximum over ranks, as the record holds it; ``refshard/replay.py`` says how it
gets there. All launches take place before the first benchmark, in the suite's own order, and are a run under ``runs/``,
which ``refshard show`` reads. ``suites/gate.toml`` takes a minute or two; another suite goes by ``--suite``, and what
``-k`` leaves out is not launched, unless as a reference.

    pytest suites/bench_cases.py --benchmark-json=cases.json
    pytest suites/bench_cases.py --suite mine.toml -k refshard-yafsdp --benchmark-json=mine.json

With ``--benchmark-disable`` the cases of the suite's last strategy take one step each, and nothing is kept.
"""

from typing import cast

import msgspec
import pytest

from refshard.commands.progress import Lines
from refshard.commands.run import Options, launcher_of
from refshard.errors import RefshardError
from refshard.folders import new_run_folder
from refshard.measure.run import round_order, run_suite
from refshard.records import LaunchRecord
from refshard.replay import Replay
from refshard.specs.case import KEYS, Case
from refshard.specs.suite import SuiteSpec, find_suite, load_suite

Launch = tuple[Case, int]
"""A case, and its round from 0."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each launch of the suite, in their order."""
    try:
        suite = suite_of(metafunc.config)
        launches = [(case, at) for at in range(suite.most_rounds) for case in round_order(suite.cases(at), at)]
    except RefshardError as error:
        pytest.fail(str(error), pytrace=False)
    ids = [f"{case.name}-round{at}" if suite.most_rounds > 1 else case.name for case, at in launches]
    metafunc.parametrize("launch", launches, ids=ids)


def suite_of(config: pytest.Config) -> SuiteSpec:
    """The suite that ``--suite`` names; with nothing to measure, its last strategy takes one step."""
    suite = load_suite(find_suite(config.getoption("--suite")))
    if config.getoption("--benchmark-disable"):
        brief = {"strategy": suite.strategies[-1], "measured_steps": 1, "traced_steps": 1, "rounds": 1}
        return msgspec.structs.replace(suite, matrix=[{**table, **brief} for table in suite.tables])
    return suite


def of_launches(suite: SuiteSpec, launches: list[Launch]) -> SuiteSpec:
    """The suite with a table for each case of ``launches``, and no other case than these and their references."""
    rounds: dict[Case, int] = {}
    for case, at in launches:
        rounds[case] = max(rounds.get(case, 0), at + 1)
    tables = [
        {**{field: [value] for field, value in case.fields.items() if field in KEYS}, "rounds": count}
        for case, count in rounds.items()
    ]
    return msgspec.structs.replace(suite, matrix=tables, case={})


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Launch, LaunchRecord]:
    """The records of all launches whose tests were selected."""
    launches: list[Launch] = [
        cast(Launch, item.callspec.params["launch"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    suite = of_launches(suite_of(request.config), launches)
    kept = not request.config.getoption("--benchmark-disable")
    folder = new_run_folder(suite.name) if kept else tmp_path_factory.mktemp("runs") / suite.name
    try:
        with Lines() as lines, launcher_of(suite, Options(suite=suite)) as launcher:
            environment = launcher.environment(suite.cases()[0].protocol.threads_per_rank, folder, print)
            run = run_suite(suite, folder, launcher, lines, environment)
    except RefshardError as error:
        pytest.fail(str(error), pytrace=False)
    return {(record.case, record.round): record for record in run.launches}


# torch's launcher leaves it to the collector to close what it logs to.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_case(replay: Replay, records: dict[Launch, LaunchRecord], launch: Launch) -> None:
    """Step times of one launch; ``extra_info`` holds its exact metrics."""
    replay(records[launch])
