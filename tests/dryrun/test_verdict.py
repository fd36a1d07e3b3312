"""What ``refshard dryrun`` prints for scripts that cannot have a verdict, or that fail: as a user runs them."""

import json
import re
from pathlib import Path

import pytest

from tests.dryrun import scripts
from tests.dryrun.test_command import run
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]


def line_of(script: str, text: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        pytest.param("import torch\n", "no optimizer step ran, and nothing was launched", marks=pytest.mark.full),
        pytest.param(scripts.FORWARD, "no optimizer step ran, and no backward", marks=pytest.mark.full),
        pytest.param(scripts.ON_THE_CPU, "3 optimizer steps ran, but nothing of their forward, backward or update"),
    ],
)
def test_no_step_on_the_gpu_is_no_verdict(tmp_path: Path, script: str, says: str) -> None:
    done = run(tmp_path, script, "--gpus", "1")
    assert done.returncode == 3, done.stderr
    assert f"NO VERDICT: {says}" in done.stdout
    assert "FITS" not in done.stdout


def test_an_assertion_on_a_value_that_was_not_computed_names_it(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.ASSERTS, "--gpus", "1")
    read = line_of(scripts.ASSERTS, "value = loss.item()")
    assert done.returncode == 1
    assert re.findall(r"^refshard: (.*) reads a value that", done.stderr, re.M) == [f"train.py:{read}"]
    assert "FAILED: AssertionError: assert 1 < value < 2" in done.stdout
    assert f"Probably because train.py:{read} reads a value that a dry run does not compute" in done.stdout


def test_compiling_without_triton_is_refused_in_two_lines(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.WITHOUT_TRITON, "--gpus", "1")
    assert done.returncode == 1
    *_, failed = done.stdout.partition("FAILED: ")
    assert failed.startswith("compiled code and Triton kernels need triton, which is not installed: pip install -e")
    assert failed.count("\n") == 3  # two of them are the sentence's
    assert failed.splitlines()[-1] == f"at train.py:{line_of(scripts.WITHOUT_TRITON, 'compiled(')} in <module>"
    assert "Traceback" not in done.stderr
    assert "fell back to eager" not in done.stderr


@pytest.mark.full
def test_the_other_setting_of_the_allocator_is_what_a_run_with_it_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = {}
    for expandable in (False, True):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{expandable}")
        found = json.loads(run(tmp_path, scripts.FRAGMENTS, "--gpus", "1", "--json").stdout)
        other = found["answer"]["other_segments"]
        assert (other["expandable"], other["fits"]) == (not expandable, True)
        reserved[expandable] = (found["peak_reserved_bytes"], other["reserved"])
    assert reserved[False] == reserved[True][::-1]
    assert reserved[False][0] > reserved[False][1]


@pytest.mark.full
def test_torchs_own_ways_to_start_need_nothing_of_the_user(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.SPAWNS, "--gpus", "2")
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout
