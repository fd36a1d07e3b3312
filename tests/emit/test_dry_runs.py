"""Emitted configurations, dry-run in the tools that read them: a rank's peak is the plan's, with what the notes add.

Put a checkout of torchtitan on PYTHONPATH, and a folder made by ``pip install --no-deps --target FOLDER deepspeed``.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refshard.emit.table import emit
from refshard.emit.tool import Setting
from tests.emit.jobs import job
from tests.fakecuda.needs import needs_device
from tests.plan.made import estimated

pytestmark = [needs_device, pytest.mark.full, pytest.mark.processes]
CLOSE = 0.03
"""How far the two may lie apart."""
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def llama():
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, use_cache=False,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
"""
ACCELERATE = """
from accelerate import Accelerator
from model import llama, torch

accelerator = Accelerator()
model = llama()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
for step in range(3):
    tokens = torch.randint(0, 128256, (1, 4096), device=accelerator.device)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
DEEPSPEED = """
import argparse
import deepspeed
from model import llama, torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
arguments = parser.parse_args()
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config):
    model = llama()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
adamw = torch.optim.AdamW(model.parameters(), fused=True)
engine, *_ = deepspeed.initialize(args=arguments, model=model, optimizer=adamw)
for step in range(3):
    tokens = torch.randint(0, 128256, (1, 4096), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
"""
TORCHTITAN = """
from dataclasses import dataclass
import torch
from torchtitan.components.data.loader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from refshard_torchtitan import configuration

if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13
    torch.distributed.set_timeout = lambda *_: None

class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, max_context_length, num_tokens_per_batch, **_):
        self.positions = torch.arange(num_tokens_per_batch) % max_context_length

    def __iter__(self):
        while True:
            tokens = torch.randint(0, 2000, self.positions.shape)
            yield {"input": tokens, "positions": self.positions}, tokens

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 0

def job():
    config = configuration()
    config.dataloader, config.tokenizer = Tokens.Config(), NoTokenizer.Config()
    config.metrics.enable_tensorboard = False
    config.training.steps = 3
    return config
"""


def planned_bytes(setting: Setting) -> float:
    """What the plan says of a rank's peak."""
    asked = setting.job
    found = estimated(asked, model=asked.model, cluster=asked.cluster or "dgx-h100", seq_len=asked.seq_len)
    return float(found.memory.peak[0])


def dry_bytes(command: str, folder: Path) -> float:
    """The peak of rank 0 of eight H100s in a dry run of ``command``."""
    dry = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--no-advise", "--json", "--"]
    done = subprocess.run([*dry, *shlex.split(command)], capture_output=True, text=True, cwd=folder, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout)["training_peak_allocated_bytes"])


def check(tool: str, fields: dict[str, Any], folder: Path, change: tuple[str, str]) -> None:
    """Emit a job for a tool, run its command with a change, and compare the peaks."""
    setting = job(cluster="dgx-h100", **{"model": "llama3.2-1b", "dp_shard": 8, "seq_len": 4096, **fields})
    emitted = emit(tool, setting)
    for name, text in emitted.files.items():
        (folder / name).write_text(text)
    (folder / "model.py").write_text(MODEL)
    assert change[0] in emitted.command
    found = dry_bytes(emitted.command.replace(*change), folder)
    assert found == pytest.approx(planned_bytes(setting) + emitted.extra_bytes, rel=CLOSE)


@pytest.mark.parametrize("policy", ["full", "none"])
def test_accelerate_takes_the_memory_of_the_plan(policy: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(ACCELERATE)
    check("accelerate", {"checkpointing": policy}, tmp_path, ("", ""))


def test_deepspeed_takes_the_memory_of_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "train.py").write_text(DEEPSPEED)
    check("deepspeed", {"checkpointing": "full"}, tmp_path, ("deepspeed --num_gpus 8 ", ""))


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpointing": "full"},
        {"checkpointing": "none"},
        {"checkpointing": "selective"},
        {"model": "qwen3-0.6b", "checkpointing": "full"},
        {"model": "qwen3-30b-a3b", "checkpointing": "full", "ep": 8},
    ],
)
def test_torchtitan_takes_the_memory_of_the_plan(fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.trainer")
    (tmp_path / "random_tokens.py").write_text(TORCHTITAN)
    check("torchtitan", fields, tmp_path, ("refshard_torchtitan --config configuration", "random_tokens --config job"))
