"""What of AdamW's state is really in 8 bits, and what is said of the rest; what Muon steps, and AdamW beside it."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.specs.case import Case
from refshard.strategies.optimizer import make_optimizer
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

pytestmark = pytest.mark.processes

CASE = Case.of(strategy="single", gpus=1, model="small", global_batch=1, seq_len=8, optimizer="adamw-8bit")
ELEMENTS = (4096, 4352, 4097, 4095, 3840)
TOLD = (
    "refshard: AdamW's state is fp32, not 8-bit, for 59 % of this rank's elements: torchao only "
    "quantises parameters with at least 4,096 elements on a rank, and a multiple of 256"
)


def quantised(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
    """Whether torchao keeps what this rank has of the parameter's first moment in 8 bits."""
    moment = optimizer.state[parameter]["exp_avg"]
    return type(moment.to_local() if isinstance(moment, DTensor) else moment) is not torch.Tensor


def step(parameters: list[nn.Parameter]) -> list[bool]:
    optimizer = make_optimizer(nn.ParameterList(parameters), CASE)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    return [quantised(parameter, optimizer) for parameter in parameters]


def test_what_stays_in_fp32_is_told() -> None:
    pytest.importorskip("torchao.optim", reason="it comes with the extra 'peers'")
    with pytest.warns(UserWarning, match=re.escape(TOLD)):
        assert step([nn.Parameter(torch.zeros(n)) for n in ELEMENTS]) == [True, True, False, False, False]


def cut(rows: int, dtype: torch.dtype) -> list[bool] | str:
    """A matrix of 128 columns, cut by its rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        return step([nn.Parameter(distribute_tensor(torch.zeros(rows, 128, dtype=dtype), mesh, [Shard(0)]))])
    except UnsupportedError as error:
        return str(error)


@pytest.mark.full
def test_a_ranks_part_decides_and_not_the_whole() -> None:
    """Also whether bf16 DTensors are refused."""
    pytest.importorskip("torchao.optim", reason="it comes with the extra 'peers'")
    assert run_ranks(2, cut, 64, torch.float32) == [[True]] * 2
    assert run_ranks(2, cut, 62, torch.float32) == [[False]] * 2, "7,936 elements, 3,968 a rank"
    assert run_ranks(2, cut, 66, torch.float32) == [[False]] * 2, "4,224 a rank, no multiple of 256"
    assert run_ranks(2, cut, 62, torch.bfloat16) == [[False]] * 2
    assert all(
        "does not support bf16 DTensors with quantised state" in said for said in run_ranks(2, cut, 64, torch.bfloat16)
    )


def test_adamw_in_fp32_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    make_optimizer(nn.ParameterList([nn.Parameter(torch.zeros(7))]), CASE.changed(optimizer="adamw"))
    assert not recwarn.list


def test_muon_steps_the_matrices_of_blocks_and_adamw_all_else() -> None:
    """Two optimizers that step as one; the embedding and the head are matrices, too."""
    model = Llama(small_spec(n_layers=2))
    optimizer = make_optimizer(model, CASE.changed(optimizer="muon"))
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    of_muon = {name_of[p] for group in optimizer.param_groups if "ns_steps" in group for p in group["params"]}
    projections = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert of_muon == {f"model.layers.{block}.{p}.weight" for block in range(2) for p in projections}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(name_of)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_matrices_muon_leaves_adamw_alone() -> None:
    """As on the first of many ranks of a pipeline, which may have no more than the embedding."""
    optimizer = make_optimizer(nn.Embedding(4, 2), CASE.changed(optimizer="muon"))
    assert ["betas" in group for group in optimizer.param_groups] == [True]
