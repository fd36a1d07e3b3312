"""The engine over parameters that tensor parallelism has split, evenly or not: norms, clipping, whole parameters,
checkpoints, refusals.
"""

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import refshard
from refshard.engine.placement import MODES
from refshard.engine.split import Split
from refshard.errors import EngineError
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.strategies.tensor_parallel import split
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

pytestmark = pytest.mark.processes

NORMS = (1.0, 2.0, math.inf)


def make_model(tied: bool = False) -> Llama:
    model = Llama(small_spec(n_layers=2, tied=tied))
    initialise(model, 0)
    return model


def tokens() -> torch.Tensor:
    return torch.arange(48).view(4, 12) * 7 % 100


def mesh_of_two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))


def clip() -> dict[Any, Any]:
    """Per mode the norms that refshard and torch find, and full parameters after a clipped step."""
    found: dict[Any, Any] = {}
    mesh = mesh_of_two_axes()
    for mode in MODES:
        model = make_model()
        split(model, mesh["tensor"])
        refshard.shard(model, mesh["shard"], mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = tokens().chunk(2)[mesh["shard"].get_local_rank()]
        next_token_loss(model(rows), rows).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        for p in NORMS:
            norms = [refshard.clip_grad_norm_(model, 1e-3, p).item()]
            for gradient, value in zip(gradients, before):
                gradient.copy_(value)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, p).item())
            found[mode, p] = norms
        optimizer.step()
        found[mode, "parameters"] = dict(refshard.full_parameters(model))
        found[mode, "sums"] = norm_of_summed_gradients(mode, mesh)
        found[mode, "sums over replicas"] = norm_of_summed_gradients(mode, mesh, splits=False)
    return found


def norm_of_summed_gradients(mode: str, mesh: DeviceMesh, *, splits: bool = True) -> float:
    """Where gradients are sums over the shard axis, while the ranks of the other axis hold parts of one gradient; or,
    where it does not split the model, over both.
    """
    model = make_model()
    if splits:
        split(model, mesh["tensor"])
    refshard.shard(model, mesh["shard"] if splits else mesh, mode=mode, gradient_divide_factor=1)
    rows = tokens().chunk(2 if splits else 4)[mesh["shard"].get_local_rank() if splits else mesh.get_rank()]
    next_token_loss(model(rows), rows).backward()
    return refshard.clip_grad_norm_(model, 1e9).item()


def test_norms_and_a_step_are_those_of_one_whole_model() -> None:
    bare = make_model()
    next_token_loss(bare(tokens()), tokens()).backward()
    elements = torch.cat([p.grad.flatten() for p in bare.parameters() if p.grad is not None])
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    for found in run_ranks(4, clip):
        for mode in MODES:
            for p in NORMS:
                assert found[mode, p] == pytest.approx([elements.norm(p).item()] * 2, rel=1e-5)
            assert found[mode, "sums"] == pytest.approx(2 * elements.norm().item(), rel=1e-5)
            assert found[mode, "sums over replicas"] == pytest.approx(4 * elements.norm().item(), rel=1e-5)
            whole = found[mode, "parameters"]
            assert whole.keys() == dict(bare.named_parameters()).keys()
            for name, parameter in bare.named_parameters():
                torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


def splits() -> list[Any]:
    mesh = mesh_of_two_axes()
    assert Split.of("a", torch.zeros(3)) is None
    with pytest.raises(EngineError) as refused:
        Split.of("a", DTensor.from_local(torch.zeros(3), mesh["tensor"], [Partial()]))
    return [str(refused.value), *(agrees(mesh, *case) for case in PLACED)]


PLACED: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    (shape, placements)
    for shape in ((5, 3), (1, 7), (9, 2), (0, 3), (4, 4))
    for placements in product((Replicate(), Shard(0), Shard(1)), repeat=2)
]


def agrees(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> bool:
    """Whether a slab is what DTensor gives this rank, and whether slabs make up the whole."""
    whole = torch.arange(float(math.prod(shape))).view(shape)
    placed = distribute_tensor(whole, mesh, placements)
    split = Split.of("a", placed)
    assert split is not None
    part = placed.to_local()
    return torch.equal(split.whole(part), whole) and torch.equal(whole[split.slab], part)


def test_slabs_are_those_of_dtensor() -> None:
    for message, *agreed in run_ranks(4, splits):
        assert message.startswith("parameter 'a' must be split by Shard and Replicate, got (Partial(sum),)")
        assert agreed == [True] * len(PLACED)


class Uneven(nn.Module):
    """Matrices of odd sizes, which tensor parallelism splits by columns and rows in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 7, dtype=torch.float64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, n, dtype=torch.float64), nn.Tanh(), nn.Linear(n, 7, dtype=torch.float64))
            for n in (5, 9, 1)
        )
        self.head = nn.Linear(7, 11, bias=False, dtype=torch.float64)
        self.mesh: DeviceMesh | None = None

    def place(self, mesh: DeviceMesh) -> None:
        """Distribute the parameters: over the last axis of the mesh, and replicated over others."""
        self.mesh = mesh
        for name, module in self.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                rows = name.endswith(".2")  # the second matrix of a layer
                last = Replicate() if rows and key == "bias" else Shard(1 if rows else 0)
                placed = distribute_tensor(parameter.detach(), mesh, [*[Replicate()] * (mesh.ndim - 1), last])
                setattr(module, key, nn.Parameter(placed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            replicated = [Replicate()] * self.mesh.ndim
            tokens = DTensor.from_local(tokens, self.mesh, replicated, run_check=False)
        x = self.embed(tokens)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=replicated)  # DTensor loses the pending sum's mask in a view
        for layer in self.layers:
            x = x + layer(x)
        logits: torch.Tensor = self.head(x)
        return logits.full_tensor() if isinstance(logits, DTensor) else logits


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "two of two": ((2, 2), ("tensor",)),
    "four": ((1, 4), ("tensor",)),  # of which the last has no row of some matrices
    "replicated": ((1, 2, 2), ("outer", "tensor")),
    "unsplit": ((4,), ()),
}


def sharded(kind: str, mode: str) -> tuple[Uneven, torch.optim.Optimizer, int, int]:
    """A model, its optimizer, and which rows of how many parts of a batch are this rank's."""
    sizes, axes = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", *axes))
    model = Uneven()
    if axes:
        model.place(mesh[axes])
    refshard.shard(model, mesh["shard"], mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, mesh["shard"].get_local_rank(), sizes[0]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, rank: int = 0, ranks: int = 1) -> list[float]:
    """Two clipped steps; the norms."""
    norms = []
    for step in range(first, first + 2):
        rows = (tokens() * (step + 1) % 11).chunk(ranks)[rank]
        nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.roll(1, 1).flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_uneven(folder: str) -> dict[tuple[str, str], Any]:
    """Two steps under the first mesh and mode, then two more from their checkpoint under every one."""
    (model, optimizer, *place), found = sharded("two of two", "yafsdp"), dict[tuple[str, str], Any]()
    norms = steps(model, optimizer, 0, *place)
    refshard.checkpoint.save(folder, model, optimizer)
    for kind, mode in product(MESHES, MODES):
        model, optimizer, *place = sharded(kind, mode)
        refshard.checkpoint.load(folder, model, optimizer)
        found[kind, mode] = norms + steps(model, optimizer, 2, *place), dict(refshard.full_parameters(model))
    return found


def test_uneven_splits_train_and_resume_like_one_whole_model(tmp_path: Path) -> None:
    bare = Uneven()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.05)
    norms = steps(bare, optimizer, 0) + steps(bare, optimizer, 2)
    for found in run_ranks(4, train_uneven, str(tmp_path / "saved")):
        assert len(found) == len(MESHES) * len(MODES)
        for case, (theirs, wholes) in found.items():
            assert theirs == pytest.approx(norms, rel=1e-9), case
            for name, parameter in bare.named_parameters():
                torch.testing.assert_close(wholes[name], parameter.detach(), rtol=0, atol=1e-9, msg=f"{case} {name}")


def reshape_one_row() -> str:
    """A parameter of one row, which the first rank has all of."""
    mesh, model = mesh_of_two_axes(), nn.Linear(3, 1, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tensor"], [Shard(0)]))
    refshard.shard(model, mesh["shard"])
    with pytest.raises(EngineError) as refused:
        model.weight.view(3)
    return str(refused.value)


def test_all_ranks_refuse_what_needs_the_whole() -> None:
    for message in run_ranks(4, reshape_one_row):
        assert "cannot be given the shape (3,), since tensor parallelism has split it" in message


def step_whole() -> tuple[str, list[bool]]:
    """What whole tensors of split parameters raise, and whether those that each rank has whole are stepped right."""
    mesh, model, bare = mesh_of_two_axes(), make_model(), make_model()
    split(model, mesh["tensor"])
    refshard.shard(model, mesh["shard"], mode="fsdp")
    with pytest.raises(EngineError) as refused:
        refshard.whole_tensors(torch.optim.Adafactor, model)
    names = [name for name, _ in bare.named_parameters() if "norm" in name]
    mine, theirs = ([dict(m.named_parameters())[name] for name in names] for m in (model, bare))
    optimizer = refshard.whole_tensors(torch.optim.Adafactor, model, mine)
    alone = torch.optim.Adafactor(theirs)
    for parameter, other in zip(mine, theirs):
        other.grad = torch.arange(1.0, 1 + other.numel()).view_as(other)
        parameter.grad = other.grad.clone()
    optimizer.step()
    alone.step()
    wholes = dict(refshard.full_parameters(model))
    return str(refused.value), [torch.equal(wholes[name], other) for name, other in zip(names, theirs)]


def test_optimizers_of_whole_tensors_refuse_what_is_split() -> None:
    for message, right in run_ranks(4, step_whole):
        assert re.search(r"whole_tensors: '.*' of shape .* is split by tensor parallelism", message)
        assert right
        assert all(right)
