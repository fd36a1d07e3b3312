"""Models that are quantised as they are loaded, and what loading takes beside training."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.dryrun import scripts
from tests.dryrun.test_command import run
from tests.fakecuda.needs import needs_device

pytest.importorskip("bitsandbytes", reason="4-bit weights and 8-bit optimizers need the extra 'peers'")
pytest.importorskip("transformers", reason="models that are loaded need the extra 'peers'")
pytestmark = [needs_device, pytest.mark.processes]

ELEMENTS = 4096 * 1024
SCALES = ELEMENTS // 64
HEAD = 1024 * 1024


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run(tmp_path_factory.mktemp("quantised"), scripts.QUANTISED, "--gpus", "1", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_loading_holds_one_layer_unquantised_at_a_time(found: dict[str, Any]) -> None:
    table, small = 1024, 512  # what an allocation of a few bytes takes
    first = ELEMENTS // 2 + SCALES + SCALES // 64 + table + 2 * small
    # The second: its weight, packed, and its scales in fp32, less their mean, and in a byte.
    second = 2 * ELEMENTS + ELEMENTS // 2 + (4 + 4 + 1) * SCALES + SCALES // 64 + table + 2 * small
    assert found["loading_peak_allocated_bytes"] == table + first + second
    assert found["training_peak_allocated_bytes"] == found["peak_allocated_bytes"]


def test_paged_state_is_counted_apart_from_the_gpu_memory(found: dict[str, Any]) -> None:
    assert found["answer"]["managed_bytes"] == 2 * 4 * HEAD
    assert found["answer"]["steps_taken"] == 3


def test_a_model_without_weights_is_told_to_be_made_from_its_configuration(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.FROM_PRETRAINED.format(checkpoint=""), "--gpus", "1")
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))" in words
    assert "at train.py:11 in <module>" not in words
    assert "train.py" in words


def test_a_sparse_checkpoint_is_loaded_and_quantised(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/hugging-face.md").read_text()
    (block,) = [code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "sparse" in code]
    made = scripts.FROM_PRETRAINED.format(checkpoint=f'{block}\nmake_sparse_checkpoint(Path("model"))')
    done = run(tmp_path, made, "--gpus", "1")
    held = re.search(r"^held (\d+)", done.stderr, re.MULTILINE)
    assert held is not None, done.stderr
    projections, wide = 2 * 4 * 1024 * 1024, 2 * 3 * 1024 * 4096
    packed = (projections + wide) // 2 + 4 * (projections + wide) // 64 + 14 * 16 * 4
    others = 2 * (2 * 1024 * 1024 + 5 * 1024)  # embedding and head, norms
    rotary = 2 * 64 * 4  # its frequencies, and the same as they were at first
    assert int(held[1]) == packed + others + rotary
