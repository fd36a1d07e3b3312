"""Checkpoints in one process: round trips to the bit, torch's own tools as readers and writers, and refusals."""

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import refshard
from refshard.engine import checkpoint
from refshard.engine.dcp import write
from refshard.engine.optimizer_state import state_of
from refshard.engine.parts import named_parts
from refshard.engine.placement import MODES
from refshard.errors import CheckpointError, EngineError
from tests.engine.fakes import Block, LateCollectives, Net, make_net, train
from tests.engine.test_properties import PartCollectives

MODE_NAMES = list(MODES)


def shard(model: nn.Module, mode: str = "fsdp") -> nn.Module:
    return refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)


def adamw(model: nn.Module, **arguments: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **arguments})


def trained(steps: int = 3, *, mode: str = "fsdp", **arguments: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    model = shard(make_net(**arguments), mode)
    optimizer = adamw(model)
    train(model, steps, optimizer=optimizer)
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Full parameters, buffers and, since one rank holds all, optimizer state, by name; copies."""
    found = checkpoint.full_state_dict(model)
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            found.update({f"{name}/{key}": value.clone() for key, value in optimizer.state[parameter].items()})
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(MODE_NAMES, MODE_NAMES)))
@pytest.mark.processes
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, saved: str, loaded: str) -> None:
    model, optimizer = trained(mode=saved)
    extra = {"step": 3, "data": {"position": [1, 2.5], "source": "synthetic", "shuffled": None}}
    checkpoint.save(tmp_path / "c", model, optimizer, extra)
    expected = everything(model, optimizer)
    losses = train(model, 3, start=3, optimizer=optimizer)

    resumed = shard(make_net(seed=1), loaded)
    fresh = adamw(resumed)
    assert checkpoint.load(tmp_path / "c", resumed, fresh) == extra
    assert_same(everything(resumed, fresh), expected)
    assert train(resumed, 3, start=3, optimizer=fresh) == losses


def test_loading_into_a_model_in_mid_training_forgets_what_it_had(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "c", model, optimizer)
    expected, losses = everything(model, optimizer), train(model, 3, start=3, optimizer=optimizer)
    kept = optimizer.state[next(model.parameters())]["exp_avg"]
    checkpoint.load(tmp_path / "c", model, optimizer)
    assert_same(everything(model, optimizer), expected)
    assert optimizer.state[next(model.parameters())]["exp_avg"] is kept, "no second copy of the state"
    assert train(model, 3, start=3, optimizer=optimizer) == losses


def test_a_checkpoint_before_the_first_step_clears_the_state(tmp_path: Path) -> None:
    model = shard(make_net())
    checkpoint.save(tmp_path / "c", model, adamw(model))
    other, optimizer = trained()
    assert checkpoint.load(tmp_path / "c", other, optimizer) == {}
    assert not optimizer.state
    assert_same(everything(other), make_net().state_dict())


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is two] for two in (True, False))
    return [refshard.whole_tensors(torch.optim.Muon, model, matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def test_two_optimizers_that_share_the_parameters_are_saved_together(tmp_path: Path) -> None:
    model, other = shard(make_net()), shard(make_net(seed=1))
    both, fresh = muon_and_adamw(model), muon_and_adamw(other)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in both:
        optimizer.step()
    checkpoint.save(tmp_path / "c", model, both)
    checkpoint.load(tmp_path / "c", other, fresh[::-1])
    for mine, theirs in zip(both, fresh):
        states = [list(optimizer.state.values()) for optimizer in (mine, theirs)]
        assert all(torch.equal(a[key], b[key]) for a, b in zip(*states) for key in a)
    refused: dict[str, list[torch.optim.Optimizer]] = {
        "holds the state of Muon, not of AdamW, for parameter 'embed.weight'": [adamw(other)],
        "of parameter 'embed.weight', which the optimizer does not have": fresh[1:],
        "Muon and AdamW both hold parameter 'embed.weight'": [fresh[0], adamw(other)],
    }
    for message, wrong in refused.items():
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path / "c", other, wrong)


def test_without_an_optimizer_the_model_alone_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "c", model, optimizer)
    other = shard(make_net(seed=1))
    checkpoint.load(tmp_path / "c", other)
    assert_same(everything(other), everything(model))


def grouped(model: nn.Module, *, swapped: bool = False, lr: float = 1e-2) -> torch.optim.AdamW:
    """Two groups, or the first of them split in two and in another order."""
    blocks = [p for n, p in model.named_parameters() if n.startswith("layers.")]
    others = [p for n, p in model.named_parameters() if not n.startswith("layers.")]
    if swapped:
        return torch.optim.AdamW([{"params": others[::-1]}, {"params": blocks[5:]}, {"params": blocks[:5]}], lr=lr)
    return torch.optim.AdamW([{"params": blocks, "weight_decay": 0.3}, {"params": others, "lr": 3e-3}], lr=lr)


def test_groups_are_matched_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    model = shard(make_net())
    optimizer = grouped(model)
    train(model, 2, optimizer=optimizer)
    optimizer.param_groups[1]["initial_lr"] = 0.5  # a scheduler's
    checkpoint.save(tmp_path / "c", model, optimizer)
    expected, losses = everything(model, optimizer), train(model, 2, start=2, optimizer=optimizer)

    resumed = shard(make_net(seed=1))
    fresh = grouped(resumed, swapped=True, lr=0.7)
    checkpoint.load(tmp_path / "c", resumed, fresh)
    assert [(g["lr"], g["weight_decay"]) for g in fresh.param_groups] == [(3e-3, 1e-2), (1e-2, 0.3), (1e-2, 0.3)]
    assert [g.get("initial_lr") for g in fresh.param_groups] == [0.5, None, None]
    assert_same(everything(resumed, fresh), expected)
    assert train(resumed, 2, start=2, optimizer=fresh) == losses


def test_how_the_optimizer_computes_is_its_own_affair(tmp_path: Path) -> None:
    model = shard(make_net())
    optimizer = adamw(model, fused=True)
    train(model, 2, optimizer=optimizer)
    checkpoint.save(tmp_path / "c", model, optimizer)
    resumed = shard(make_net())
    fresh = adamw(resumed, foreach=False, lr=torch.tensor(0.5))
    checkpoint.load(tmp_path / "c", resumed, fresh)
    assert (fresh.param_groups[0]["fused"], fresh.param_groups[0]["foreach"]) == (None, False)
    assert torch.equal(fresh.param_groups[0]["lr"], torch.tensor(1e-2))
    assert_same(everything(resumed, fresh), everything(model, optimizer))


class Odd(nn.Module):
    """Buffers of all kinds, parameters with no dimension and with no element, and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(5), nn.Linear(5, 5)])
        self.again = self.layers[1]
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.layers[1](self.layers[0](x)) + self.nothing.sum()
        return out


def train_odd(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + 3):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_buffers_odd_shapes_and_other_optimizers(tmp_path: Path, kind: Any) -> None:
    arguments = {"lr": 1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    torch.manual_seed(0)
    model = shard(Odd())
    optimizer = kind(model.parameters(), **arguments)
    train_odd(model, optimizer)
    checkpoint.save(tmp_path / "c", model, optimizer)
    expected = everything(model, optimizer)
    losses = train_odd(model, optimizer, start=3)

    other = Odd()
    other.table.zero_()  # type: ignore[operator]
    resumed = shard(other)
    fresh = kind(resumed.parameters(), **arguments)
    checkpoint.load(tmp_path / "c", resumed, fresh)
    assert_same(everything(resumed, fresh), expected)
    assert "scratch" not in expected
    assert train_odd(resumed, fresh, start=3) == losses


@pytest.mark.parametrize("tied", [False, True])
def test_the_full_state_dict_is_the_bare_models(tied: bool) -> None:
    bare = make_net(tied=tied)
    found = checkpoint.full_state_dict(shard(make_net(tied=tied)))
    assert_same(found, bare.state_dict())
    assert list(found) == list(bare.state_dict())
    assert (found["head.weight"] is found["embed.weight"]) == tied
    assert list(checkpoint.full_state_dict(shard(Odd()))) == list(Odd().state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_torch_reads_a_checkpoint_into_a_plain_model(tmp_path: Path, tied: bool) -> None:
    model, optimizer = trained(tied=tied)
    checkpoint.save(tmp_path / "c", model, optimizer, {"step": 3})
    expected = everything(model)

    bare = make_net(seed=1, tied=tied)
    dcp_load({"model": bare.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_same(dict(bare.state_dict()), expected)

    dcp_to_torch_save(tmp_path / "c", tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt")
    bare.load_state_dict(converted["model"], strict=True)
    assert_same(dict(bare.state_dict()), expected)
    assert converted["extra"] == {"step": 3}
    assert converted["optimizer"]["param_groups"][0]["lr"] == 1e-2
    average = converted["optimizer"]["state"]["layers.0.up.weight"]["exp_avg"]
    local = optimizer.state[dict(model.named_parameters())["layers.0.up.weight"]]["exp_avg"]
    assert torch.equal(average, local.view(13, 6))


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", shard(make_net(tied=True)))
    stored = FileSystemReader(tmp_path / "c").read_metadata().storage_data
    places = {index.fqn: (info.relative_path, info.offset) for index, info in stored.items()}
    assert places["model.head.weight"] == places["model.embed.weight"]


def test_a_checkpoint_that_torch_wrote_can_be_loaded(tmp_path: Path) -> None:
    bare = make_net()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3)
    train(bare, 3, optimizer=optimizer)
    state = {"model": bare.state_dict(), "optimizer": get_optimizer_state_dict(bare, optimizer)}
    dcp_save(copy.deepcopy(state), checkpoint_id=tmp_path / "c", no_dist=True)
    model = shard(make_net(seed=1))
    fresh = adamw(model)
    assert checkpoint.load(tmp_path / "c", model, fresh) == {}
    assert fresh.param_groups[0]["lr"] == 3e-3
    assert train(model, 3, start=3, optimizer=fresh) == train(bare, 3, start=3, optimizer=optimizer)


def test_untied_values_do_not_load_into_a_tied_model(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", shard(make_net()))
    model = shard(make_net(seed=1, tied=True))
    with pytest.raises(CheckpointError, match=r"different values of 'embed\.weight' and 'head\.weight'"):
        checkpoint.load(tmp_path / "c", model)
    assert_same(everything(model), make_net(seed=1, tied=True).state_dict())

    bare = make_net(tied=True)  # which torch writes under both names, equal
    dcp_save({"model": bare.state_dict()}, checkpoint_id=tmp_path / "equal", no_dist=True)
    checkpoint.load(tmp_path / "equal", model)
    assert_same(everything(model), bare.state_dict())


def wider() -> nn.Module:
    model = make_net(seed=1)
    model.layers[2] = Block(6)
    model.layers[2].up = nn.Linear(6, 13, bias=False)
    model.layers[2].down = nn.Linear(13, 6)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Net(dim=8), r"holds parameter 'embed\.weight' with shape \(11, 6\), but the model's has \(11, 8\)"),
        (lambda: Net(n_blocks=5), r"lacks parameter 'layers\.4\.norm\.weight' of shape \(6,\), which the model has"),
        (lambda: Net(n_blocks=3), r"holds 'layers\.3\.down\.weight', which the model lacks"),
        (wider, r"holds 'layers\.2\.up\.bias', which the model lacks"),
    ],
)
def test_another_models_checkpoint_is_refused_and_nothing_changed(tmp_path: Path, make: Any, message: str) -> None:
    checkpoint.save(tmp_path / "c", *trained())
    other = shard(make())
    optimizer = adamw(other)
    before = everything(other)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "c", other, optimizer)
    assert_same(everything(other), before)
    assert not optimizer.state


def damage(folder: Path, how: str) -> None:
    data = folder / "__0_0.distcp"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "no data":
        data.unlink()
    elif how == "no metadata":
        (folder / ".metadata").unlink()
    elif how == "torn metadata":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-100])
    else:
        (folder / ".metadata").write_bytes(pickle.dumps("a pickle of something else"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"incomplete: __0_0\.distcp must have \d+ bytes, but has \d+"),
        ("no data", r"incomplete: __0_0\.distcp must have \d+ bytes, but has 0"),
        ("no metadata", r"no complete checkpoint: it has no \.metadata; give the folder of a save"),
        ("torn metadata", r"\.metadata is damaged"),
        ("foreign metadata", r"\.metadata (is damaged|was not written by)"),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_changed(tmp_path: Path, how: str, message: str) -> None:
    checkpoint.save(tmp_path / "c", *trained())
    damage(tmp_path / "c", how)
    other = shard(make_net(seed=1))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "c", other, adamw(other))
    assert_same(everything(other), make_net(seed=1).state_dict())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "c", model, optimizer)
    other = shard(make_net(seed=1))
    parameters = list(other.parameters())
    refused = {
        r"holds the state of AdamW, not of SGD": torch.optim.SGD(parameters, lr=1.0),
        r"state of parameter 'embed\.weight', which the optimizer does not have": torch.optim.AdamW(parameters[1:]),
        r"group 0 holds a parameter that is not the sharded model's": adamw(make_net()),
    }
    for message, wrong in refused.items():
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path / "c", other, wrong)
    assert_same(everything(other), make_net(seed=1).state_dict())

    checkpoint.save(tmp_path / "bare", model)
    with pytest.raises(CheckpointError, match=r"holds no optimizer state; load with optimizer=None"):
        checkpoint.load(tmp_path / "bare", other, adamw(other))
    checkpoint.save(tmp_path / "part", model, torch.optim.AdamW(list(model.parameters())[:3]))
    with pytest.raises(CheckpointError, match=r"no optimizer group with parameter 'layers\.\d.*', which group 0"):
        checkpoint.load(tmp_path / "part", other, adamw(other))


def test_a_group_cannot_join_what_was_saved_with_different_settings(tmp_path: Path) -> None:
    model = shard(make_net())
    checkpoint.save(tmp_path / "c", model, grouped(model))
    with pytest.raises(
        CheckpointError, match=r"weight_decay = 0\.01 for parameter '.*' and 0\.3 for '.*', but group 0"
    ):
        checkpoint.load(tmp_path / "c", model, adamw(model))


def with_odd_state(model: nn.Module) -> torch.optim.Optimizer:
    """State that no reader of checkpoints could load without running its code."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[next(model.parameters())]["rows"] = nn.Linear(1, 1)
    return optimizer


def test_state_of_a_part_that_is_neither_elementwise_nor_scalar_is_refused() -> None:
    model = refshard.shard(make_net(), mode="fsdp", collectives=PartCollectives(1, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[next(model.parameters())]["rows"] = torch.zeros(3, 1)
    with pytest.raises(CheckpointError, match=r"'rows' of parameter 'embed\.weight' in SGD has the shape \(3, 1\)"):
        state_of([optimizer], named_parts(model))


@pytest.mark.parametrize(
    ("extra", "optimizer", "message"),
    [
        ({"tokens": (1, 2)}, None, r"extra must be made of .* got \{'tokens': \(1, 2\)\}"),
        ({1: 2}, None, "extra must be made of dictionaries with string keys"),
        ({"loss": float("nan")}, None, "finite numbers"),
        ({"model": nn.Linear(1, 1)}, None, "extra must be made of"),
        (
            None,
            with_odd_state,
            r"'optimizer\.state\.embed\.weight\.rows' must be made of numbers, strings, tensors",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_and_the_old_checkpoint_stays(
    tmp_path: Path, extra: Any, optimizer: Any, message: str
) -> None:
    model = shard(make_net())
    checkpoint.save(tmp_path / "c", model, extra={"step": 1})
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "c", model, optimizer and optimizer(model), extra)
    assert checkpoint.load(tmp_path / "c", model) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds 'notes\.txt', which replacing the folder would delete"):
        checkpoint.save(tmp_path, shard(make_net()))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_model_that_is_not_sharded_is_refused(tmp_path: Path) -> None:
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises((EngineError, CheckpointError), match=r"not sharded; call refshard\.shard|no complete"):
            call(tmp_path / "c", make_net())


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", {("refshard",): {"format": 99}}, {})
    with pytest.raises(CheckpointError, match=r"has format 99, this refshard reads up to 1; update refshard"):
        checkpoint.load(tmp_path / "c", shard(make_net()))
