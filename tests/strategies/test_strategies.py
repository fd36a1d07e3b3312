"""Every strategy on two ranks: units found on the model, collectives as announced, parameters whole."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import refshard.strategies
from refshard.errors import SpecError
from refshard.models.data import SyntheticTokens, rank_batch
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.records import CollectiveCount
from refshard.strategies import check_name, make_strategy, names
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

C10D = {
    "allreduce_": ("all_reduce", lambda args: sum(t.nbytes for t in args[0])),
    "_allgather_base_": ("all_gather", lambda args: args[0].nbytes),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: args[1].nbytes),
    "alltoall_base_": ("all_to_all", lambda args: args[1].nbytes),
    "broadcast_": ("broadcast", lambda args: sum(t.nbytes for t in args[0])),
}


class CountingMode(TorchDispatchMode):
    """Counts collectives at the dispatcher, independently of traces and of what strategies say."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.sizes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            op, size = C10D[name.removeprefix("c10d::")]
            self.counts[op] += 1
            self.sizes[op] += size(args)
        return func(*args, **(kwargs or {}))

    def found(self) -> tuple[CollectiveCount, ...]:
        return tuple(CollectiveCount(op=o, count=self.counts[o], bytes=self.sizes[o]) for o in sorted(self.counts))


def train(tied: bool) -> dict[str, Any]:
    spec = small_spec(n_layers=3, tied=tied)
    found = {}
    for name in [n for n in names() if n != "single"]:
        model = Llama(spec)
        initialise(model, 0)
        strategy = make_strategy(name)
        assert dist.group.WORLD is not None
        module = strategy.wrap(model, dist.group.WORLD)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        source = SyntheticTokens(spec.vocab, 0)
        losses = []
        for step in range(4):
            batch = rank_batch(source, step=step, rank=dist.get_rank(), world_size=2, global_batch=4, seq_len=8)
            with CountingMode() as counted:
                loss = next_token_loss(module(batch[0]), batch[1])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[name] = {
            "units": strategy.wrapped_units(),
            "announced": strategy.announced(),
            "counted": counted.found(),
            "losses": losses,
            "parameters": dict(strategy.full_parameters()),
        }
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def trained(request: pytest.FixtureRequest) -> tuple[bool, dict[str, Any]]:
    return request.param, run_ranks(2, train, request.param)[0]


SHARDED = [n for n in names() if n not in ("single", "ddp")]


@pytest.mark.parametrize("name", [n for n in names() if n != "single"])
def test_announced_collectives_are_those_at_the_dispatcher(trained: tuple[bool, dict[str, Any]], name: str) -> None:
    assert trained[1][name]["announced"] == trained[1][name]["counted"]


@pytest.mark.parametrize("name", SHARDED)
def test_every_block_is_a_unit(trained: tuple[bool, dict[str, Any]], name: str) -> None:
    assert {f"model.layers.{i}" for i in range(3)} < set(trained[1][name]["units"])


@pytest.mark.parametrize("name", SHARDED)
def test_losses_and_parameters_equal_ddp_to_the_bit(trained: tuple[bool, dict[str, Any]], name: str) -> None:
    ours, ddp = trained[1][name], trained[1]["ddp"]
    assert ours["losses"] == ddp["losses"]
    assert ours["parameters"].keys() == ddp["parameters"].keys()
    assert all(torch.equal(ours["parameters"][n], p) for n, p in ddp["parameters"].items())


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(SpecError, match=r"strategy: no strategy 'fsdp3'; did you mean 'fsdp2'\?"):
        check_name("fsdp3")


def test_a_strategy_is_under_120_lines() -> None:
    folder = Path(refshard.strategies.__file__).parent
    assert max(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 120
