"""Rounds of the same code against itself: recorded, read back from several folders, and what is kept of them."""

from pathlib import Path

import numpy as np
import pytest

from refshard.analysis.rehearsal import noise_of
from refshard.errors import SpecError, StoreError
from refshard.measure.gate import keep_noise, noise_file, read_noise, read_rounds, record_rounds
from refshard.measure.launchers.base import LaunchOutcome
from refshard.specs.case import Case
from refshard.specs.gate import TimeLimits
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, good, make_suite, rank_result, write_rank

SUITE = make_suite(matrix={"strategy": ["ddp", "refshard-yafsdp"], "gpus": [2], "model": ["llama-tiny"]})


def recorded(folder: Path, rounds: int, seed: int) -> Path:
    """Rounds of launches whose times scatter by 3 %."""
    drawn = np.random.default_rng(seed)

    def outcome(case: Case, work: Path) -> LaunchOutcome:
        good(case, work)
        factor = float(np.exp(drawn.normal(0, 0.03)))
        for rank in range(case.processes):
            times = tuple(factor * t for t in rank_result(case, rank).step_times_s)
            write_rank(case, work, rank, step_times_s=times)
        return LaunchOutcome()

    references = [case for case in SUITE.cases() if case == case.reference()]
    timed = [case for case in SUITE.cases() if case not in references]
    launcher = FakeLauncher(outcome)
    record_rounds(SUITE, references, timed, folder, launcher, ENVIRONMENT, Silent(), print, rounds=rounds)
    assert len(launcher.series) == 2 * rounds
    return folder


@pytest.mark.slow
def test_what_was_recorded_apart_is_read_together(tmp_path: Path) -> None:
    first, second = recorded(tmp_path / "1", 3, seed=1), recorded(tmp_path / "2", 5, seed=2)
    header, rounds, launches = read_rounds([first, second])
    assert header.suite == SUITE
    assert launches == 16
    assert {name.split("-w")[0]: len(r) for name, r in rounds.items()} == {"ddp": 8, "refshard-yafsdp": 8}
    one = read_rounds([first])[1]
    for name, log_ratios in rounds.items():
        assert log_ratios[:3] == pytest.approx(one[name])
        assert (log_ratios != 0).all()


def test_folders_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = recorded(tmp_path / "1", 1, seed=1)
    with pytest.raises(SpecError, match="a folder is given twice"):
        read_rounds([first, tmp_path / "." / "1"])
    with pytest.raises(StoreError, match="holds no run"):
        read_rounds([tmp_path / "none"])


@pytest.mark.full
def test_noise_is_kept_for_machine_and_suite_with_its_limits(tmp_path: Path) -> None:
    _, rounds, launches = read_rounds([recorded(tmp_path / "1", 66, seed=3)])
    noise = noise_of(rounds, TimeLimits(), launches=launches, gates=10)
    path = keep_noise(noise, SUITE, ENVIRONMENT, tmp_path / "baselines")
    assert path == noise_file(tmp_path / "baselines", ENVIRONMENT, "fake") == tmp_path / "baselines/e/fake.noise.json"
    kept = read_noise(path)
    assert kept is not None
    assert (kept.noise, kept.limits, kept.fingerprint) == (noise, TimeLimits(), "e")
    assert noise.launches == 132
    assert all(0.02 < case.spread < 0.07 for case in noise.cases.values()), "3 % on either side are 4.2 % of a round"
    path.write_text(path.read_text()[:-30])
    with pytest.raises(StoreError, match="restore it, or measure the noise again"):
        read_noise(path)
    assert read_noise(tmp_path / "none.json") is None
