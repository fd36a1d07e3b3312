"""The step that is timed: how a batch is split, and that the parts' gradients add up to the batch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from refshard.measure.rank import RankResult, measure
from refshard.measure.trainer import Trainer
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.specs.job import Tuning, Workload
from refshard.strategies.base import Loop, Strategy
from refshard.strategies.loop import PlainLoop
from refshard.strategies.world import World
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

pytestmark = pytest.mark.processes


class Watching(Strategy):
    """One rank whose gradients, batches and microbatches are written down."""

    def __init__(self) -> None:
        self.unsynced: list[int] = []
        self.batches: list[int] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def wrap(self, model: Llama, world: World) -> Loop:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: self.gradients.update({n: p.grad.clone()}))
        model.register_forward_pre_hook(lambda _, args: self.batches.append(args[0].shape[0]))
        return PlainLoop(model, world, unsynced=self._leave_unsynced)

    @contextmanager
    def _leave_unsynced(self) -> Iterator[None]:
        before = len(self.batches)
        yield
        self.unsynced += range(before, len(self.batches))

    def wrapped_units(self) -> tuple[str, ...]:
        return ("all",)

    def announced(self) -> tuple[CollectiveCount, ...]:
        return ()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def watch(case: Case) -> Watching:
    assert dist.group.WORLD is not None
    strategy = Watching()
    trainer = Trainer(case, small_spec(), strategy, dist.group.WORLD, torch.device("cpu"))
    trainer.timed_step(aligned=False)
    return strategy


def case(microbatches: int = 1, workload: Workload = "training") -> Case:
    return Case.of(
        strategy="single", gpus=1, model="small", global_batch=8, seq_len=8, microbatches=microbatches,
        workload=workload,
    )  # fmt: skip


def watch_all() -> dict[str, tuple[list[int], list[int], dict[str, torch.Tensor]]]:
    cases = {"whole": case(), "parts": case(4), "inference": case(workload="inference")}
    return {key: (w.unsynced, w.batches, w.gradients) for key, c in cases.items() if (w := watch(c))}


def test_gradients_of_microbatches_add_up_to_those_of_the_batch() -> None:
    seen = run_ranks(1, watch_all)[0]
    unsynced, batches, whole = seen["whole"]
    assert (unsynced, batches) == ([], [8])
    unsynced, batches, parts = seen["parts"]
    assert unsynced == [0, 1, 2], "all but the last"
    assert batches == [2, 2, 2, 2]
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    assert seen["inference"] == ([], [8], {})


def measured(tuning: Tuning, trace: Path) -> RankResult:
    tuned = Case.of(
        strategy="single", gpus=1, model="llama-tiny", global_batch=1, seq_len=16, tuning=tuning,
        measured_steps=3, traced_steps=1,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    return measure(tuned, dist.group.WORLD, torch.device("cpu"), trace, lambda *_: None)


@pytest.mark.full
def test_operators_and_memory_of_adapters_are_those_of_a_step_with_dropout(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need the extra 'peers'")
    full, lora = (run_ranks(1, measured, tuning, tmp_path / f"{tuning}.json.gz")[0] for tuning in ("full", "lora"))
    assert full.operators.count("aten.bernoulli_.float") == 0
    assert lora.operators.count("aten.bernoulli_.float") == 6 * 7, "one for each linear of each block"
    assert len(lora.losses) == len(full.losses) + 2, "the two steps that are watched"
