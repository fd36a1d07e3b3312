"""Checkpoints over gloo: other world sizes and modes, torch FSDP2 as a reader, and ranks that fail or are killed."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import refshard
from refshard.engine import checkpoint
from refshard.engine.dcp import read, write
from refshard.engine.local_part import LocalPart, local_of, whole_of
from refshard.engine.parts import named_parts
from refshard.engine.whole import Whole
from refshard.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.engine.fakes import LateCollectives, loss_of, make_batch, make_net

pytestmark = pytest.mark.processes

ROWS = 12
BEFORE, AFTER = 3, 4
"""Steps before and after the checkpoint."""
Pieces = dict[str, tuple[tuple[int, ...], int, torch.Tensor]]
"""This rank's part of each parameter and of each elementwise state: the whole's shape, the part's first element."""


def sharded(mode: str, *, seed: int = 0, tied: bool = False) -> tuple[nn.Module, torch.optim.AdamW]:
    model = refshard.shard(make_net(seed, tied=tied), mode=mode, debug=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, steps: int) -> list[float]:
    """Train on this rank's rows of each batch; return the losses over all ranks."""
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses = []
    for step in range(start, start + steps):
        inputs, targets = (t.chunk(world_size)[rank] for t in make_batch(step, rows=ROWS))
        loss = loss_of(model, (inputs, targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pieces:
    found: Pieces = {}
    for part in named_parts(model):
        held = {"": part.parameter.detach(), **optimizer.state[part.parameter]}
        for key, value in held.items():
            whole = whole_of(value)
            local = local_of(value).clone()
            found[f"{part.name}/{key}"] = (
                value.shape,
                whole.start if whole else 0,
                local.flatten() if value.dim() else local,
            )
    return found


def assemble(of_ranks: list[Pieces]) -> dict[str, torch.Tensor]:
    """Whole tensors from every rank's pieces; scalars must be the same on all ranks."""
    found = {}
    for name, (shape, _, like) in of_ranks[0].items():
        if not like.dim():
            assert len({of_rank[name][2].item() for of_rank in of_ranks}) == 1, name
            found[name] = like
            continue
        flat = torch.full((torch.Size(shape).numel(),), float("nan"))
        for of_rank in of_ranks:
            _, first, part = of_rank[name]
            assert flat[first : first + part.numel()].isnan().all(), f"{name}: held twice"
            flat[first : first + part.numel()] = part
        found[name] = flat.view(shape)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@contextmanager
def largest_file(limit_bytes: int) -> Iterator[None]:
    """The kernel lets this process write no file beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_and_go_on(folder: Path) -> dict[str, Any]:
    """Save under two modes and tied or not, go on; resume at once in a fresh model; then fail to save."""
    found: dict[str, Any] = {}
    for name, mode, other, tied in (("plain", "fsdp", "yafsdp", False), ("tied", "yafsdp", "fsdp", True)):
        model, optimizer = sharded(mode, tied=tied)
        train(model, optimizer, 0, BEFORE)
        checkpoint.save(folder / name, model, optimizer, {"step": BEFORE, "mode": mode})
        found[name] = pieces(model, optimizer)
        found[f"{name} full"] = checkpoint.full_state_dict(model)
        found[f"{name} losses"] = train(model, optimizer, BEFORE, AFTER)
        resumed, fresh = sharded(other, seed=1, tied=tied)
        checkpoint.load(folder / name, resumed, fresh)
        found[f"{name} resumed"] = train(resumed, fresh, BEFORE, AFTER)
    found["replicated"] = save_what_all_ranks_hold(folder.with_name("replicated"))
    with largest_file(2**13 if dist.get_rank() == 1 else resource.RLIM_INFINITY):
        try:
            checkpoint.save(folder / "plain", model, optimizer)
        except CheckpointError as error:
            found["failure"] = str(error)
    return found


def save_what_all_ranks_hold(folder: Path) -> tuple[torch.Tensor, int]:
    """What a mode that replicates asks for: every rank offers all; reads a ragged part; the number of bytes written."""
    value = torch.arange(60_000.0).view(100, 20, 30)
    write(folder, {("model", "w"): value}, {})
    whole = Whole("w", value.shape, ((707, 5707),), LateCollectives())
    part = torch.zeros(5000)
    read(folder, {"model.w": LocalPart(part, whole)})
    return part, sum(path.stat().st_size for path in folder.glob("*.distcp"))


def resume(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mode, tied in (("plain", "yafsdp", False), ("tied", "fsdp", True)):
        model, optimizer = sharded(mode, seed=1, tied=tied)
        found[f"{name} extra"] = checkpoint.load(folder / name, model, optimizer)
        found[name] = pieces(model, optimizer)
        found[f"{name} losses"] = train(model, optimizer, BEFORE, AFTER)
    found["fsdp2"] = resume_in_fsdp2(folder / "plain")
    model, optimizer = sharded("fsdp")
    rank_2_finds_none, rank_2_finds_another = (
        "plain" if dist.get_rank() != 2 else name for name in ("nothing", "tied")
    )
    found["errors"] = []
    for name in ("nothing", rank_2_finds_none, rank_2_finds_another):
        try:
            checkpoint.load(folder / name, model, optimizer)
        except CheckpointError as error:
            found["errors"].append(str(error))
    return found


def resume_in_fsdp2(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What torch FSDP2 reads through torch's own functions, and how it goes on."""
    model: nn.Module = make_net(seed=1)
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp_load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    full = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            full[f"{name}/{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return full, train(model, optimizer, BEFORE, AFTER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks saved, and what each reports of it."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, save_and_go_on, folder)


@pytest.fixture(scope="module")
def resumed(saved: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What three ranks made of it."""
    return run_ranks(3, resume, saved[0])


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_two_ranks_go_on_under_another_mode_to_the_bit(saved: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    for report in saved[1]:
        assert report[f"{name} resumed"] == report[f"{name} losses"]


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_three_ranks_hold_every_bit_and_go_on(
    saved: tuple[Path, list[dict[str, Any]]], resumed: list[dict[str, Any]], name: str
) -> None:
    reports = saved[1]
    assert_same(assemble([r[name] for r in resumed]), assemble([r[name] for r in reports]))
    assert resumed[0][f"{name} extra"] == {"step": BEFORE, "mode": "fsdp" if name == "plain" else "yafsdp"}
    assert resumed[0][f"{name} losses"] == pytest.approx(reports[0][f"{name} losses"], rel=1e-6)


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_one_rank_holds_every_bit_and_goes_on(saved: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    folder, reports = saved
    model = refshard.shard(make_net(seed=1, tied=name == "tied"), mode="fsdp", collectives=LateCollectives())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint.load(folder / name, model, optimizer)
    assert_same(assemble([pieces(model, optimizer)]), assemble([r[name] for r in reports]))
    assert train(model, optimizer, BEFORE, AFTER) == pytest.approx(reports[0][f"{name} losses"], rel=1e-6)


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_the_full_state_dict_is_on_rank_0(saved: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    _, reports = saved
    bare = make_net(seed=1, tied=name == "tied")
    assert list(reports[0][f"{name} full"]) == list(bare.state_dict())
    assert reports[1][f"{name} full"] == {}
    bare.load_state_dict(reports[0][f"{name} full"])
    expected = assemble([r[name] for r in reports])
    assert_same(
        {f"{n}/": p.detach() for n, p in bare.named_parameters()}, {n: v for n, v in expected.items() if n[-1] == "/"}
    )


def test_what_all_ranks_hold_is_written_once(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    for part, written in (report["replicated"] for report in saved[1]):
        assert torch.equal(part, torch.arange(707.0, 5707.0))
        assert 240_000 <= written < 260_000


def test_torch_fsdp2_reads_parameters_and_optimizer(
    saved: tuple[Path, list[dict[str, Any]]], resumed: list[dict[str, Any]]
) -> None:
    full, losses = resumed[0]["fsdp2"]
    assert_same(full, assemble([r["plain"] for r in saved[1]]))
    assert losses == pytest.approx(saved[1][0]["plain losses"], rel=1e-6)


def test_a_rank_that_cannot_write_fails_all_and_the_old_checkpoint_stays(
    saved: tuple[Path, list[dict[str, Any]]], resumed: list[dict[str, Any]]
) -> None:
    folder, reports = saved
    for report in reports:
        assert "rank 1 failed with OSError: [Errno 27] File too large" in report["failure"]
    assert sorted(p.name for p in folder.iterdir()) == ["plain", "tied"], "nothing is left behind"
    assert resumed[0]["plain extra"]["step"] == BEFORE


def test_ranks_that_see_different_folders_all_raise(resumed: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(resumed):
        nothing, one_lacks, one_differs = report["errors"]
        assert "holds no complete checkpoint" in nothing
        assert ("holds no complete checkpoint" if rank == 2 else "rank 2 failed with CheckpointError") in one_lacks
        assert "rank 2 finds another checkpoint than rank 0" in one_differs


def be_killed_while_saving(folder: Path) -> None:
    model, optimizer = sharded("fsdp")
    train(model, optimizer, 0, BEFORE)
    checkpoint.save(folder / "c", model, optimizer, {"step": BEFORE})
    train(model, optimizer, BEFORE, AFTER)
    if dist.get_rank() == 1:
        # The kernel stops the write at this size and signals it; then the rank dies as one does that runs out of
        # memory, in the middle of its file and with no chance to tidy up.
        signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))
    checkpoint.save(folder / "c", model, optimizer, {"step": BEFORE + AFTER})


def test_a_save_that_is_killed_half_way_leaves_the_last_good_one(
    tmp_path: Path, saved: tuple[Path, list[dict[str, Any]]]
) -> None:
    with pytest.raises((ProcessExitedException, ProcessRaisedException), match=r"SIGKILL|closed|reset|peer"):
        run_ranks(2, be_killed_while_saving, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".c.partial", "c"]
    torn = tmp_path / ".c.partial" / "__1_0.distcp"
    assert torn.stat().st_size == 2**13, "the rank died in the middle of its file"

    model = refshard.shard(make_net(seed=1), mode="fsdp", collectives=LateCollectives())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert checkpoint.load(tmp_path / "c", model, optimizer) == {"step": BEFORE}
    assert_same(assemble([pieces(model, optimizer)]), assemble([r["plain"] for r in saved[1]]))

    checkpoint.save(tmp_path / "c", model, optimizer, {"step": 100})
    assert [p.name for p in tmp_path.iterdir()] == ["c"], "the next save tidies up"
    assert checkpoint.load(tmp_path / "c", model, optimizer) == {"step": 100}
