"""Mixtures of experts: expert parallelism over a mesh of its own, and everything else sharded over all ranks.

The model is that of ``docs/examples/train_moe_refshard.py``, with what DeepSeek-V3 adds: a first layer without
experts, experts that all tokens go to, and a bias on the router's choice.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import refshard
from refshard.engine.placement import MODES
from refshard.errors import EngineError, SpecError
from tests.distributed.ranks import run_each, run_ranks

pytestmark = pytest.mark.processes

STEPS = 6
ROWS = 8


@functools.cache
def example() -> ModuleType:
    """The documented script, as a module."""
    path = Path(__file__).parents[2] / "docs" / "examples" / "train_moe_refshard.py"
    spec = importlib.util.spec_from_file_location("train_moe_refshard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Dense(nn.Module):
    """A feed-forward layer: what every token goes through."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.up(x)))
        return out


class Shared(nn.Module):
    """Experts beside one that all tokens go to."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.routed = example().MoE()
        self.shared = Dense(dim, 2 * dim)
        self.register_buffer("bias", torch.linspace(0, 0.3, example().EXPERTS))
        self.routed.router.register_forward_hook(lambda _, __, logits: logits + self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.routed(x) + self.shared(x)
        return out


def make_model(kind: str, *, checkpointed: bool = False) -> Any:
    """Qwen3's layout, or DeepSeek-V3's; the same for all ranks, in fp64."""
    torch.manual_seed(0)
    model = example().Model()
    if kind == "deepseek":
        model.layers[0].moe = Dense(example().DIM, 64)
        for layer in list(model.layers)[1:]:
            layer.moe = Shared(example().DIM)
    for layer in model.layers if checkpointed else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model.double()


class Layout(NamedTuple):
    """How many ranks hold the same experts (``edp``), share the experts out (``ep``), and replicate all of it."""

    edp: int
    ep: int
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.edp * self.ep


def shard(model: nn.Module, layout: Layout, mode: str, **options: Any) -> None:
    """Spread the experts, then shard."""
    sizes = {"replicate": layout.replicas, "edp": layout.edp, "ep": layout.ep}
    fine = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    everywhere: DeviceMesh = init_device_mesh("cpu", (layout.ranks,))
    own = fine["edp"]
    if layout.replicas > 1:
        everywhere = init_device_mesh("cpu", (layout.replicas, layout.edp * layout.ep), mesh_dim_names=("r", "s"))
        own = fine["replicate", "edp"]
    for module in model.modules():
        if isinstance(module, example().MoE):
            module.ep = fine["ep"]
            module.experts.spread(fine["ep"])
    policies = {"*.experts": refshard.Policy(mesh=own)}
    refshard.shard(model, everywhere, mode=mode, policies=policies, **options)


def train(model: nn.Module, rank: int, ranks: int, clip: Callable[[nn.Module], torch.Tensor]) -> list[float]:
    """Norms of gradients; each rank takes its rows of every batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        batch = torch.randint(example().VOCAB, (ROWS, 9), generator=torch.Generator().manual_seed(step)).chunk(ranks)
        F.cross_entropy(model(batch[rank][:, :-1]).flatten(0, 1), batch[rank][:, 1:].flatten()).backward()
        norms.append(clip(model).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@functools.cache
def alone(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model(kind)
    norms = train(model, 0, 1, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5))
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def together(kind: str, layout: Layout, mode: str, own_clip: bool, checkpointed: bool) -> Any:
    """Norms, whole parameters and final ones after a checkpoint has gone to a model of another mode."""
    model = make_model(kind, checkpointed=checkpointed)
    shard(model, layout, mode)

    def clip(model: nn.Module) -> torch.Tensor:
        return refshard.clip_grad_norm_(model, 0.5) if own_clip else nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    norms = train(model, dist.get_rank(), layout.ranks, clip)
    return norms, dict(refshard.full_parameters(model))


QWEN_4, QWEN_8 = ("qwen", Layout(2, 2)), ("qwen", Layout(2, 4))
DEEPSEEK_4, DEEPSEEK_8 = ("deepseek", Layout(1, 4)), ("deepseek", Layout(2, 2, replicas=2))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [QWEN_4, *(pytest.param(*case, marks=pytest.mark.full) for case in (DEEPSEEK_4, QWEN_8, DEEPSEEK_8))],
)
def test_a_mixture_trains_like_one_process(kind: str, layout: Layout) -> None:
    calls = [(kind, layout, mode, place % 2 == 0, place % 3 == 0) for place, mode in enumerate(MODES)]
    norms, expected = alone(kind)
    for found in run_each(layout.ranks, together, calls):
        for (_, _, mode, _, _), (their_norms, wholes) in zip(calls, found):
            assert their_norms == pytest.approx(norms, rel=1e-9), mode
            assert wholes.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(wholes[name], value, rtol=1e-7, atol=1e-9, msg=f"{mode}: {name}")


def saved_and_loaded(folder: str) -> bool:
    """A mixture over two ranks of experts is saved, and loaded where four ranks share the experts."""
    models = make_model("qwen"), make_model("qwen")
    shard(models[0], Layout(2, 2), "yafsdp")
    train(models[0], dist.get_rank(), 4, lambda m: refshard.clip_grad_norm_(m, 0.5))
    refshard.checkpoint.save(folder, models[0])
    shard(models[1], Layout(1, 4), "fsdp")
    refshard.checkpoint.load(folder, models[1])
    wholes = [dict(refshard.full_parameters(model)) for model in models]
    state = refshard.checkpoint.full_state_dict(models[1])
    assert all(torch.equal(state[name], value) for name, value in wholes[0].items() if state)
    return all(torch.equal(wholes[1][name], value) for name, value in wholes[0].items())


def test_a_checkpoint_goes_from_one_spread_of_experts_to_another(tmp_path: Path) -> None:
    assert all(run_ranks(4, saved_and_loaded, str(tmp_path / "saved")))


def refusals() -> list[str]:
    """What is said where meshes do not go together, or names do not tell experts apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    messages = []

    def refused(kind: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            call()
        messages.append(str(caught.value))

    model = make_model("qwen")
    model.layers[0].moe.experts.spread(mesh["ep"])
    refused(SpecError, lambda: refshard.shard(model, init_device_mesh("cpu", (4,)), mode="fsdp"))
    plain = make_model("qwen")
    policies = {"*.experts": refshard.Policy(mesh=mesh["edp"])}
    refshard.shard(plain, init_device_mesh("cpu", (4,)), mode="fsdp", policies=policies)
    refused(EngineError, lambda: refshard.checkpoint.full_state_dict(plain))
    refused(EngineError, lambda: refshard.checkpoint.save("unused", plain))
    refused(SpecError, lambda: refshard.shard(make_model("qwen"), policies={"*.exprts": refshard.Policy()}))
    return messages


def test_meshes_that_do_not_go_together_are_refused() -> None:
    for overlapping, whole, saved, unknown in run_ranks(4, refusals):
        assert "split over ranks that its unit 'layers.0' is sharded over, too; give its module a policy" in overlapping
        assert "'layers.0.moe.experts.up' cannot be saved: ranks outside of its policy's mesh" in whole
        assert "'layers.0.moe.experts.up' cannot be saved: ranks outside of its policy's mesh" in saved
        assert "policies: no module's name matches '*.exprts'" in unknown
