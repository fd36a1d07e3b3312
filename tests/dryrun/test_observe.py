"""What a dry run learns of a script beside what the device sees: tokens, parameters, peaks that the script resets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.full]
GIB = 2**30

SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions, self.head = nn.Embedding(512, 64), nn.Embedding(128, 64), nn.Linear(64, 512)
        self.buffers = []  # as Megatron's wrapper has

    def forward(self, ids):
        return self.head(self.embedding(ids) + self.positions(torch.arange(128, device="cuda").expand_as(ids)))

class Loss(nn.Module):
    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

with torch.device("cuda"):
    model, loss, ids = Model(), Loss(), torch.zeros(4, 128, dtype=torch.long)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
large = torch.empty(2**30, device="cuda")
del large
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
for _ in range(10):
    for _ in range(2):
        loss(model(ids=ids), ids).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "train.py").write_text(SCRIPT)
    asked = ("--cluster", "dgx-h100", "--gpus", "1", "--json")
    command = [sys.executable, "-m", "refshard", "dryrun", *asked, "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["answer"]
    return found


def test_tokens_given_by_name_are_counted_once(answer: dict[str, Any]) -> None:
    """Neither positions nor the labels that a loss is given count, and every microbatch does."""
    assert answer["tokens"] == 3 * 2 * 4 * 128


def test_parameters_are_those_of_the_outermost_modules(answer: dict[str, Any]) -> None:
    assert answer["parameters"] == 512 * 64 + 128 * 64 + 64 * 512 + 512


def test_a_peak_before_the_script_reset_its_statistics_counts(answer: dict[str, Any]) -> None:
    assert answer["peak"]["allocated"] >= 4 * GIB
    assert answer["peak"]["reserved"] >= 4 * GIB
    assert answer["now"]["reserved"] < GIB


DISTRIBUTED = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
model = distribute_module(nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512)).cuda(), mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = torch.zeros(4, 128, dtype=torch.long, device="cuda")
ids = DTensor.from_local(part, mesh, [Shard(0), Shard(1), Replicate()])
for _ in range(3):
    model(ids).sum().backward()
    optimizer.step()
"""


def test_tokens_of_a_distributed_tensor_are_counted_by_the_rank(tmp_path: Path) -> None:
    """A batch of 8 x 256 over 8 ranks, of which four share a sequence: each has its part of the tokens."""
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--json", "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens_per_s_gpu"] == pytest.approx(8 * 256 / 8 / found["step_s"])


NESTED = """
import torch
from refshard.dryrun.observe import Observer

class Ext:
    def in_optimizer(self, inside):
        print("in" if inside else "out")

    def mark(self, name):
        print(name)

    def is_capturing(self):
        return False

class Both(torch.optim.Optimizer):
    def __init__(self, *parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self):
        for part in self.parts:
            part.step()
            print("part")

one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
one.grad, two.grad = torch.ones(2), torch.ones(3)
both = Both(torch.optim.SGD([one], lr=0.1), torch.optim.SGD([two], lr=0.1))
observer = Observer(Ext(), 9)
observer.install()
for _ in range(2):
    both.step()
    print(observer.stepped, observer.steps_taken)
"""


def test_optimizers_that_step_within_another_are_a_part_of_its_step() -> None:
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    step = ["in", "part", "part", "out", "step"]
    assert done.stdout.splitlines() == [*step, "5 1", *step, "5 2"]


CLOSURE = (
    NESTED[: NESTED.index("class Both")]
    + """
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)

def closure():
    print("forward")
    weight.sum().backward()

observer = Observer(Ext(), 9)
observer.install()
optimizer.step(CLOSURE)
print(observer.stepped)
"""
)


@pytest.mark.parametrize("given", ["closure", "closure=closure"])
def test_a_closure_of_a_step_is_no_part_of_the_optimizer(given: str) -> None:
    """Lightning's Trainer runs forward and backward in one."""
    code = CLOSURE.replace("CLOSURE", given)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["in", "out", "forward", "in", "out", "step", "3"]


BY_NAME = """
import sys
import torch
from torch import nn
from refshard.dryrun.observe import Observer

class Ext:
    def __getattr__(self, name):
        return lambda *_: 0

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids=None, mask=None):
        return self.embedding(input_ids)

model = Model()
observer = Observer(Ext(), 9)
observer.install()
if sys.argv[1] == "wrapped":
    model = torch.compile(model, backend="eager")
if sys.argv[1] == "in place":
    model.compile(backend="eager")
for _ in range(2):
    model(mask=torch.ones(2, 3, dtype=torch.long), input_ids=torch.zeros(2, 5, dtype=torch.long))
print(observer.tokens)
"""


@pytest.mark.parametrize("how", ["eager", "wrapped", "in place"])
def test_token_ids_given_by_name_are_counted_in_compiled_modules(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", BY_NAME, how], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[10, 10]"]
