"""torch's own ways of saving and loading: what is written must be the whole model, or nothing."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import refshard
from tests.distributed.cases.case import PLAIN, case
from tests.distributed.cases.models import Language, Stack, adamw, next_token, train
from tests.distributed.cases.sides import DIM, Side, whole_of


def _log_state(side: Side, state: dict[str, Any]) -> None:
    for name, value in state.items():
        side.log(f"saved {name}", value)


def _trained(side: Side) -> Stack:
    model = side.shard(Stack())
    train(side, model, steps=2)
    return model


@case(variants=PLAIN, table=True)
def dcp_saved_and_loaded_bare(side: Side) -> None:
    """What sharded ranks saved, one bare process reads."""
    model = _trained(side)
    save({"model": model.state_dict()}, checkpoint_id=side.folder / "saved")
    bare = Stack([type(layer)() for layer in model.layers])
    state = {"model": bare.state_dict()}
    load(state, checkpoint_id=side.folder / "saved", no_dist=True)
    _log_state(side, state["model"])


class Even(nn.Module):
    """Each unit is one matrix that two ranks share evenly, so that parts of one length pass for one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, x[:, :3]], 1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _even(side: Side) -> Even:
    model = side.shard(Even())
    train(side, model, steps=2)
    return model


@case(variants=PLAIN, table=True)
def dcp_of_even_parts_loaded_bare(side: Side) -> None:
    """No shape tells that the first rank's parts are not the whole's."""
    save({"model": _even(side).state_dict()}, checkpoint_id=side.folder / "saved")
    state = {"model": Even().state_dict()}
    load(state, checkpoint_id=side.folder / "saved", no_dist=True)
    _log_state(side, state["model"])


@case(variants=PLAIN, table=True)
def dcp_of_even_parts_loaded_sharded(side: Side) -> None:
    save({"model": _even(side).state_dict()}, checkpoint_id=side.folder / "saved")
    other = side.shard(Even())
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=side.folder / "saved")
    other.load_state_dict(state["model"])
    train(side, other)


@case(variants=PLAIN, table=True)
def even_parts_saved_by_torch(side: Side) -> None:
    """``torch.save`` on the first rank keeps its parts; the whole is what the file must hold."""
    state = _even(side).state_dict()
    whole = {name: whole_of(value) for name, value in state.items()}
    if side.rank == 0:
        torch.save(whole, side.folder / "saved.pt")
    _log_state(side, whole)


@case(variants=PLAIN, table=True, refuses="cannot be pickled or saved by torch.save")
def parts_saved_by_torch(side: Side) -> None:
    """``torch.save(model.state_dict())`` on the first rank, whose file is all that is kept."""
    state = _even(side).state_dict()
    if side.rank == 0:
        torch.save(dict(state), side.folder / "saved.pt")
        state = torch.load(side.folder / "saved.pt", weights_only=False)
    _log_state(side, state)


@case(variants=PLAIN, table=True)
def dcp_saved_and_loaded_sharded_alike(side: Side) -> None:
    model = _trained(side)
    save({"model": model.state_dict()}, checkpoint_id=side.folder / "saved")
    other = side.shard(Stack())
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=side.folder / "saved")
    other.load_state_dict(state["model"])
    train(side, other)


@case(variants=PLAIN, table=True)
def dcp_saved_and_loaded_sharded_otherwise(side: Side) -> None:
    """Loaded where the axis to shard over has another length."""
    model = _trained(side)
    save({"model": model.state_dict()}, checkpoint_id=side.folder / "saved")
    other = side.shard(Stack(), replicas=True)
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=side.folder / "saved")
    other.load_state_dict(state["model"])
    train(side, other)


@case(variants=PLAIN, table=True)
def state_dict_in_inference_mode(side: Side) -> None:
    """Saved from within an evaluation, and the whole too."""
    model = _trained(side)
    with torch.inference_mode():
        side.log_rows("out", model(side.x()))
        state = model.state_dict()
        _log_state(side, state)
        _log_state(side, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        save({"model": state}, checkpoint_id=side.folder / "saved")
    bare = {"model": Stack().state_dict()}
    load(bare, checkpoint_id=side.folder / "saved", no_dist=True)
    _log_state(side, bare["model"])
    train(side, model)


@case(variants=PLAIN)
def dcp_of_model_and_optimizer(side: Side) -> None:
    """``get_state_dict`` and ``set_state_dict``, as torch's tutorial has it."""
    model = side.shard(Stack())
    optimizer = adamw(model.parameters())
    train(side, model, optimizer=optimizer, steps=2)
    state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": state, "optimizer": optimizer_state}, checkpoint_id=side.folder / "saved")
    other = side.shard(Stack())
    again = adamw(other.parameters())
    state, optimizer_state = get_state_dict(other, again)
    load({"model": state, "optimizer": optimizer_state}, checkpoint_id=side.folder / "saved")
    set_state_dict(other, again, model_state_dict=state, optim_state_dict=optimizer_state)
    train(side, other, optimizer=again, start=2)


@case(variants=PLAIN)
def dcp_of_a_tied_model(side: Side) -> None:
    model = side.shard(Language(tied=True))
    train(side, model, lambda step: next_token(model, side.tokens(step)), steps=2)
    save({"model": model.state_dict()}, checkpoint_id=side.folder / "saved")
    state = {"model": Language(tied=True).state_dict()}
    load(state, checkpoint_id=side.folder / "saved", no_dist=True)
    _log_state(side, state["model"])


@case(variants=PLAIN, table=True)
def state_dict_saved_by_torch_and_loaded_bare(side: Side) -> None:
    """``torch.save(model.state_dict())`` on the first rank, read by a bare model."""
    model = _trained(side)
    state = model.state_dict()
    whole = {name: whole_of(value) for name, value in state.items()}
    if side.rank == 0:
        torch.save(whole, side.folder / "saved.pt")
    side.log("saved", 1.0)
    bare = Stack()
    bare.load_state_dict(whole)
    _log_state(side, dict(bare.named_parameters()))


@case(variants=PLAIN)
def state_dict_copied_to_a_sharded_twin(side: Side) -> None:
    """In place and in memory: parts go to parts."""
    model = _trained(side)
    other = side.shard(Stack())
    other.load_state_dict(model.state_dict())
    train(side, other)


@case(variants=PLAIN, table=True)
def whole_state_dict_loaded_into_a_sharded_model(side: Side) -> None:
    """What ``load_state_dict`` gets is what a bare model saved."""
    torch.manual_seed(5)
    saved = Stack().state_dict()
    model = side.shard(Stack())
    model.load_state_dict(saved)
    train(side, model)


@case(variants=PLAIN, table=True)
def full_state_dict_by_torch(side: Side) -> None:
    model = _trained(side)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    side.log("plain", float(all(type(value) is torch.Tensor for value in state.values())))
    _log_state(side, state)


@case(variants=PLAIN)
def full_state_dict_on_the_host(side: Side) -> None:
    """With ``cpu_offload`` the first rank alone gets it."""
    model = _trained(side)
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    side.log("values", float(len(state) > 0) if side.rank == 0 else 1.0)
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        value = state[name].norm() if side.rank == 0 else torch.zeros(())
        side.log_mean(f"norm of {name}", value * side.world_size)


@case(variants=PLAIN, table=True)
def full_state_dict_set_by_torch(side: Side) -> None:
    torch.manual_seed(5)
    saved = Stack().state_dict()
    model = side.shard(Stack())
    set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True))
    train(side, model)


@case(variants=PLAIN)
def full_state_dict_set_from_the_first_rank(side: Side) -> None:
    torch.manual_seed(5)
    saved = Stack().state_dict() if side.rank == 0 else {}
    model = side.shard(Stack())
    ranks = side.world_size > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks)
    set_model_state_dict(model, saved, options=options)
    train(side, model)


@case(variants=PLAIN)
def sharded_state_dict_by_torch(side: Side) -> None:
    model = _trained(side)
    state = get_model_state_dict(model)
    other = side.shard(Stack())
    set_model_state_dict(other, state)
    train(side, other)


@case(variants=PLAIN)
def full_optimizer_state_by_torch(side: Side) -> None:
    model = side.shard(Stack())
    optimizer = adamw(model.parameters())
    train(side, model, optimizer=optimizer, steps=2)
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    for name, values in state["state"].items():
        for key, value in values.items():
            side.log(f"{name} {key}", value)
    other = adamw(model.parameters())
    set_optimizer_state_dict(model, other, state, options=options)
    train(side, model, optimizer=other, start=2)


@case(variants=PLAIN)
def full_optimizer_state_set_from_the_first_rank(side: Side) -> None:
    model = side.shard(Stack())
    optimizer = adamw(model.parameters())
    train(side, model, optimizer=optimizer, steps=2)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=side.world_size > 1)
    other = adamw(model.parameters())
    set_optimizer_state_dict(model, other, state if side.rank == 0 else {}, options=options)
    train(side, model, optimizer=other, start=2)


@case(variants=PLAIN)
def loaded_before_sharding(side: Side) -> None:
    torch.manual_seed(5)
    saved = Stack().state_dict()
    model = Stack()
    model.load_state_dict(saved)
    train(side, side.shard(model))


@case(variants=PLAIN)
def state_dict_names(side: Side) -> None:
    """Names are those of the bare model, in its order."""
    assert list(_trained(side).state_dict()) == list(Stack().state_dict())
    side.log("same", 1.0)


@case(variants=PLAIN, refuses="cannot be copied or pickled")
def model_saved_whole_by_torch(side: Side) -> None:
    """``torch.save(model)``."""
    model = side.shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2)), blocks=["0", "1"])
    train(side, model, steps=2)
    torch.save(model, side.folder / f"model {side.rank}.pt")


@case(variants=PLAIN)
def buffers_saved(side: Side) -> None:
    """Buffers are in the state dict as they are."""
    model = side.shard(Stack([nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))]))
    same = side.put(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    for _ in range(2):
        model(same).sum().backward()
        model.zero_grad()
    _log_state(side, {n: v for n, v in model.state_dict().items() if "running" in n})


def _assigned(side: Side, model: nn.Module) -> None:
    """Write to all weights as one vector."""
    vector = torch.linspace(-1, 1, sum(p.numel() for p in model.parameters())).to(side.device)
    nn.utils.vector_to_parameters(vector, model.parameters())


@case(variants=PLAIN, table=True, refuses="whole|part|replaced|moved|data")
def vector_to_parameters_then_wholes(side: Side) -> None:
    model = _trained(side)
    _assigned(side, model)
    side.log_parameters(model)


@case(variants=PLAIN, table=True, refuses="whole|part|replaced|moved|data")
def vector_to_parameters_then_state_dict(side: Side) -> None:
    model = _trained(side)
    _assigned(side, model)
    _log_state(side, model.state_dict())


@case(variants=PLAIN, table=True, refuses="whole|part|replaced|moved|data")
def vector_to_parameters_then_checkpoint(side: Side) -> None:
    """What the checkpoint holds is what a twin loads."""
    model = _trained(side)
    _assigned(side, model)
    if side.engine:
        refshard.checkpoint.save(side.folder / "saved", model)
        model = side.shard(Stack())
        refshard.checkpoint.load(side.folder / "saved", model)
        side.models.pop(0)
    side.log_parameters(model)
