"""Which steps a dry run takes: of optimizers that step in backward, and until the peak is stable."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from refshard.dryrun.observe import ALIKE_STEPS, VARIED_STEPS
from tests.dryrun import scripts
from tests.dryrun.test_command import run
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]
MIB = 2**20


def answer(folder: Path, script: str, *options: str) -> tuple[dict[str, Any], str]:
    done = run(folder, script, "--gpus", "1", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_step_of_optimizers_in_backward_ends_with_backward(tmp_path: Path) -> None:
    found, printed = answer(tmp_path, scripts.IN_BACKWARD, "--steps", "1")
    assert found["answer"]["outcome"] == "stepped"
    assert found["answer"]["steps_taken"] == 1
    assert re.findall(r"^step (\d+)", printed, re.MULTILINE) == ["0"]
    # One gradient at a time; a step counter of 512 bytes a parameter.
    assert found["peak_by_category"]["gradients"] == 4 * MIB
    assert found["peak_by_category"]["optimizer"] == 4 * (2 * 4 * MIB + 512)


def test_auto_goes_on_until_the_peak_is_stable(tmp_path: Path) -> None:
    longest = 6
    found, _ = answer(tmp_path, scripts.LENGTHS.format(longest=longest, lengths=3), "--steps", "auto")
    assert found["answer"]["steps_taken"] == longest + 1 + VARIED_STEPS
    assert found["answer"]["batches"] == [[2, 256], [2, 512], [2, 768], [2, 2048]]
    (said,) = [sentence for sentence in found["says"] if sentence.startswith("Batches vary")]
    assert said == (
        "Batches vary: 4 shapes seen, the longest seen 2 x 2,048 tokens. Longer ones need more memory. After "
        f"{longest + 1 + VARIED_STEPS} steps the peak was stable."
    )


def test_auto_takes_few_steps_of_batches_of_one_shape(tmp_path: Path) -> None:
    found, _ = answer(tmp_path, scripts.LENGTHS.format(longest=-1, lengths=1), "--steps", "auto")
    assert found["answer"]["steps_taken"] == 2 + ALIKE_STEPS  # the second step has the optimizer's state from the start
    assert any(one.startswith("All batches are of 2 x 256 tokens. Batches of mixed lengths") for one in found["says"])


def test_a_given_number_of_steps_names_auto_if_batches_vary(tmp_path: Path) -> None:
    found, _ = answer(tmp_path, scripts.LENGTHS.format(longest=-1, lengths=2))
    assert found["answer"]["steps_taken"] == 3
    assert any(one.endswith("Try: --steps auto, which goes on until the peak is stable.") for one in found["says"])
