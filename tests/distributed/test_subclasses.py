"""Quantised models of bitsandbytes and torchao on several ranks: like one process, and like FSDP2, to the bit."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import refshard
from refshard.engine.local_part import LocalPart
from refshard.engine.placement import MODES
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.processes

WIDTH = 64


def four_bits() -> nn.Module:
    """A layer of bitsandbytes, its scales quantised again."""
    from bitsandbytes import nn as theirs

    layer: nn.Module = theirs.Linear4bit(  # type: ignore[attr-defined]
        WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    return layer.to("cpu")  # which quantises


def eight_bits() -> nn.Module:
    """Another one; its bias is not trained."""
    from bitsandbytes import nn as theirs

    layer: nn.Module = theirs.Linear8bitLt(  # type: ignore[attr-defined]
        WIDTH, WIDTH, has_fp16_weights=False
    )
    return layer.to("cpu").requires_grad_(False)


class NF4(nn.Module):
    """A layer of torchao's, as torchtune has it."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.quantization import to_nf4

        self.weight = nn.Parameter(to_nf4(torch.randn(WIDTH, WIDTH) / 8, 64, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Adapted(nn.Module):
    """A layer under an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (nn.Parameter(torch.randn(shape) / 8) for shape in ((4, WIDTH), (WIDTH, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)
        return out


class Net(nn.Module):
    """Layers between others that are not quantised."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


KINDS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "4 bits": ("bitsandbytes", four_bits),
    "8 bits": ("bitsandbytes", eight_bits),
    "nf4": ("torchao", NF4),
    "float8": ("torchao", nn.Module),
}


def adapted(kind: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(lambda: Adapted(KINDS[kind][1]()))


def train(model: nn.Module, ranks: int, rank: int | None = None, *, steps: range = range(3)) -> list[float]:
    """The losses of a rank, or of all, whose rows one process takes by turns."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in steps:
        rows = torch.randn(4 * ranks, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(ranks)
        for mine in rows if rank is None else [rows[rank]]:
            loss = model(mine).square().mean()
            losses.append(loss.item())
            (loss / (ranks if rank is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_adapters(kind: str, folder: str) -> dict[str, Any]:
    """By mode: losses, what is trained, losses after a checkpoint of the mode before, and names of what is saved. Ranks
    begin with weights of their own.
    """
    found: dict[str, Any] = {}
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for place, mode in enumerate(MODES):
        model = adapted(kind, seed=rank)
        refshard.shard(model, mode=mode, debug=True)
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))
        model.train()
        losses = train(model, ranks, rank)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        wholes = {name: value for name, value in refshard.full_parameters(model) if name in trained}
        refshard.checkpoint.save(f"{folder}/{mode}", model)
        other = adapted(kind, seed=5)
        refshard.shard(other, mode=mode)
        refshard.checkpoint.load(f"{folder}/{[*MODES][max(place - 1, 0)]}", other)
        again = train(other, ranks, rank, steps=range(3, 5))
        found[mode] = losses, wholes, again, sorted(refshard.checkpoint.full_state_dict(model)), saved_by_torch(model)
    return found


def saved_by_torch(model: nn.Module) -> list[str]:
    """Names of what is whole in a whole state dict by torch's functions, which cannot take some of bitsandbytes'."""
    if any(name.endswith("SCB") for name in model.state_dict()):
        return sorted(model.state_dict())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return sorted(name for name, value in state.items() if type(value) is not LocalPart)


def in_float8() -> Net:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = Net(lambda: nn.Sequential(nn.Linear(WIDTH, 80), nn.Tanh(), nn.Linear(80, WIDTH, bias=False)))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "layers" in name)
    return model


def train_in_float8() -> dict[str, Any]:
    """Losses and wholes by mode, and in FSDP2."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    ranks, rank = dist.get_world_size(), dist.get_rank()
    model: Any = in_float8()
    for module in (*model.layers, model):
        fully_shard(module)
    losses = train(model, ranks, rank)
    found: dict[str, Any] = {"fsdp2": (losses, {n: whole_of_float8(p) for n, p in model.named_parameters()})}
    for mode in MODES:
        model = in_float8()
        refshard.shard(model, mode=mode, debug=True)
        precompute_float8_dynamic_scale_for_fsdp(model)
        losses = train(model, ranks, rank)
        found[mode] = losses, dict(refshard.full_parameters(model))
    return found


def whole_of_float8(parameter: Any) -> torch.Tensor:
    whole = parameter.full_tensor().detach()
    value: torch.Tensor = getattr(whole, "_tensor", whole)
    return value


def train_all(kinds: list[str], folder: str) -> dict[str, Any]:
    """Everything in one launch: the packages take long to import."""
    return {kind: train_in_float8() if kind == "float8" else train_adapters(kind, f"{folder}/{kind}") for kind in kinds}


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, by kind of weights, as far as the packages are there."""
    kinds = [kind for kind, (package, _) in KINDS.items() if find_spec(package)]
    return run_ranks(2, train_all, kinds, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "nf4"])
def test_adapters_on_quantised_weights_train_and_resume_like_one_process(
    kind: str, by_rank: list[dict[str, Any]]
) -> None:
    pytest.importorskip(KINDS[kind][0], reason="it comes with the extra 'peers'")
    bare = adapted(kind)
    losses = train(bare, 2)
    trained = {name: p.detach().clone() for name, p in bare.named_parameters() if p.requires_grad}
    names = sorted(bare.state_dict())
    again = train(bare, 2, steps=range(3, 5))
    for rank, found in enumerate(by_rank):
        assert found[kind].keys() == MODES.keys()
        for mode, (mine, wholes, later, saved, by_torch) in found[kind].items():
            assert mine == losses[rank::2], mode
            assert later == again[rank::2], mode
            assert wholes.keys() == trained.keys()
            assert all(torch.equal(wholes[name], value) for name, value in trained.items()), mode
            assert saved == (names if rank == 0 else []), mode
            in_parts = kind == "nf4" and mode != "replicate"
            assert by_torch == [name for name in names if not (in_parts and name.endswith("base.weight"))], mode


def test_float8_weights_are_gathered_and_trained_as_by_fsdp2(by_rank: list[dict[str, Any]]) -> None:
    pytest.importorskip("torchao", reason="it comes with the extra 'peers'")
    for found in by_rank:
        losses, wholes = found["float8"]["fsdp2"]
        for mode in MODES:
            mine, values = found["float8"][mode]
            assert mine == losses, mode
            assert values.keys() == wholes.keys()
            assert all(torch.equal(values[name], value) for name, value in wholes.items()), mode
