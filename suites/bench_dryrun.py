"""Dry runs of real models: how long they take, and how much of the host's memory.

The aims: Llama 3 8B under FSDP2 on 8 ranks, three steps, at most 10 s in all and 1 GB of the host's memory; Llama 3.1
405B, tensor parallel in nodes of 8 and FSDP2 over 64 nodes, at most 60 s; QLoRA of an 8B on one GPU, at most 30 s; a
mixture of experts of 30B with expert parallelism, run twice because sizes depend on its routing, at most 40 s; the 8B
with compiled blocks, at most 30 s. The fake device is built before, where it is not yet.

    pytest suites/bench_dryrun.py --benchmark-json=dryrun.json
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from refshard import resources
from refshard.fakecuda.build import extension

EXAMPLES = resources.root() / "docs" / "examples"
LAYERS = {"train_fsdp2.py": 32, "train_tp_fsdp2.py": 126, "qlora.py": 32, "train_moe.py": 48}


def dry_run(cluster: str, script: str, layers: int) -> dict[str, Any]:
    """What ``refshard dryrun --json`` says."""
    gpus = ("--gpus", "1") if script == "qlora.py" else ()
    name, *options = script.split()
    trained = (str(EXAMPLES / name), *options, "--layers", str(layers))
    command = [sys.executable, "-m", "refshard", "dryrun", "--json", "--cluster", cluster, *gpus, "--", *trained]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("cluster", "script"),
    [
        pytest.param("dgx-h100", "train_fsdp2.py", id="llama3-8b-fsdp2-8"),
        pytest.param("dgx-h100x64", "train_tp_fsdp2.py", id="llama3.1-405b-tp8-fsdp64"),
        pytest.param("dgx-h100", "train_fsdp2.py --compile", id="llama3-8b-fsdp2-8-compiled"),
        pytest.param("rtx-4090", "qlora.py", id="llama3.1-8b-qlora"),
        pytest.param("dgx-h100", "train_moe.py", id="qwen3-30b-a3b-ep8"),
    ],
)
def test_dry_run(benchmark: Any, request: pytest.FixtureRequest, cluster: str, script: str) -> None:
    """From the command to its answer; of two layers without measuring."""
    extension()
    layers = 2 if request.config.getoption("--benchmark-disable") else LAYERS[script.split()[0]]
    found = benchmark.pedantic(dry_run, args=(cluster, script, layers), rounds=3, iterations=1)
    assert found["answer"]["steps_taken"] == 3
    assert found["answer"]["host_peak_bytes"] < 2e9
    benchmark.extra_info["host peak, bytes"] = found["answer"]["host_peak_bytes"]
    benchmark.extra_info["peak reserved, bytes"] = found["answer"]["peak"]["reserved"]
