"""``refshard fit``: a plan's best configuration as a dry run, and as the command that trains it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.commands.dryrun_model import training_command
from refshard.commands.fit import train_command, training_of
from refshard.measure.dry.train import read_case
from refshard.specs.job import Job
from refshard.specs.suite import load_suite
from tests.commands.conftest import Command
from tests.fakecuda.needs import needs_device

PLANNED: dict[str, Any] = {"model": "llama-tiny", "gpus": 8, "cluster": "dgx-h100", "seq_len": 64, "precision": "bf16"}
JOBS = [
    Job(strategy="ddp", global_batch=8, **PLANNED),
    Job(strategy="fsdp2", global_batch=64, microbatches=4, checkpointing="full", **PLANNED),
    Job(strategy="fsdp2", global_batch=8, dp_replicate=2, frozen="embedding", **PLANNED),
    Job(strategy="fsdp2", global_batch=4, tp=2, **PLANNED),
]


@pytest.mark.parametrize("job", JOBS)
def test_the_dry_run_is_of_the_planned_job(job: Job) -> None:
    words, tokens = training_command(training_of(job), job.cluster, job.gpus)
    assert read_case(words[2:]).job == job
    assert tokens == job.global_batch * job.seq_len


@pytest.mark.parametrize("job", JOBS)
def test_the_command_trains_the_planned_job(job: Job, refshard: Command, tmp_path: Path) -> None:
    program, *words = train_command(training_of(job), job)
    suite = tmp_path / "suite.toml"
    assert program == "refshard"
    assert refshard(*words, "--set", "device=cuda", "--list", "--write", str(suite)).returncode == 0
    assert msgspec.structs.replace(job, cluster="") in [case.job for case in load_suite(suite).cases()]


@needs_device
@pytest.mark.slow
@pytest.mark.processes
def test_what_fits_is_dry_run() -> None:
    command = [sys.executable, "-m", "refshard", "fit", "llama-tiny", "2xh100", "--seq-len", "64", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["train"].startswith("PYTORCH_ALLOC_CONF=expandable_segments:True refshard run --model llama-tiny")
    assert found["fits"] is True
    assert found["plan"]["fits"] is True
