"""What the engine allocates in a step once its order is known.

A reduced gradient is a new shard in each step: kept from step to step it would lie beside the activations at the loss,
where memory peaks.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import refshard
from refshard.engine.api import engine_of
from refshard.engine.buffers import Pool
from refshard.engine.precision import Precision
from refshard.engine.unit import Unit
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net

ENGINE = str(Path(refshard.__file__).parent / "engine")
TESTS = str(Path(__file__).parent)
SHARD = "aten.empty_like.default"
"""Makes the reduced gradient of a unit."""


class Allocations(TorchDispatchMode):
    """Counts what the engine allocates while it is entered, by the name of the unit or of the op.

    No op tells when a pool's storage comes back; it is looked at with every op, of which there are some between any two
    uses of a slot. A pool has the name of the first unit that uses it. A new tensor is the engine's if the innermost
    Python frame that is neither torch's nor this class's is in the engine.
    """

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._pools: dict[str, Pool] = {}
        for unit in engine_of(model).units:
            for role, slot in (("parameters", unit.slot), ("gradients", unit.gradients.slot)):
                if slot.pool not in self._pools.values():
                    self._pools[f"{role} of {unit.name}"] = slot.pool
        self._there = {name: self._has_storage(name) for name in self._pools}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if any(t.untyped_storage()._cdata not in given for t in made) and _is_the_engines():
            self.found[str(func)] += 1
        return out

    def _look(self) -> None:
        for name, before in self._there.items():
            now = self._has_storage(name)
            self.found[name] += now and not before
            self._there[name] = now

    def _has_storage(self, name: str) -> bool:
        return self._pools[name].memory.untyped_storage().nbytes() > 0


def _is_the_engines() -> bool:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((ENGINE, TESTS)):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(ENGINE)


def allocations(
    mode: str, *, bf16: bool = False, tied: bool = False, keep: bool = False, steps: int = 3
) -> Counter[str]:
    """What the engine allocates in ``steps`` steps that follow the first two."""
    model = make_net(tied=tied)
    precision = Precision(parameters=torch.bfloat16) if bf16 else None
    refshard.shard(model, mode=mode, collectives=LateCollectives(), precision=precision, keep_buffers=keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        loss_of(model, make_batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number)
    # The third step's forward is what moves the units into their ring.
    step(2)
    with Allocations(model) as counted:
        for number in range(3, 3 + steps):
            step(number)
    found: Counter[str] = +counted.found
    return found


def test_persistent_storage_is_allocated_once() -> None:
    assert allocations("replicate") == {}
    assert allocations("zero1") == {SHARD: 3 * 6}


def test_what_is_kept_is_allocated_once() -> None:
    assert allocations("yafsdp", keep=True) == {SHARD: 3 * 6}


def test_what_is_given_back_is_allocated_once_in_forward_and_once_in_backward() -> None:
    """Not anew for each block. One slot of the ring holds the last block at the loss; the other comes back after it.

    Columns with few uses are allocated for each; that no op runs between the head's parameters and its gradients hides
    one here.
    """
    ring = {"parameters of layers.0": 2 * 3, "parameters of layers.1": 3}
    few = {"parameters of embed": 2 * 3, "parameters of norm+head": 3, "gradients of layers.2": 2 * 3}
    assert allocations("yafsdp") == {**ring, **few, SHARD: 3 * 6}


def test_mixed_precision_adds_only_the_casts_of_the_units_inputs() -> None:
    """Those are activations, which no slot could hold."""
    found = {name for name in allocations("yafsdp", bf16=True) if name.startswith("aten")}
    assert found - set(allocations("yafsdp")) <= {"aten._to_copy.default"}


def test_a_tied_unit_allocates_once_a_step_and_lasts() -> None:
    assert allocations("yafsdp", tied=True)["parameters of embed+norm+head"] == 3


def test_a_transient_unit_allocates_for_each_use() -> None:
    found = allocations("fsdp", steps=1)
    assert found["parameters of layers.1"] == 2
    assert found["gradients of layers.1"] == 1


class Together(TorchDispatchMode):
    """Names the units that hold slots for their parameters and for their gradients at once, as of each op."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._units = units
        self.found: set[str] = set()
        self.had_gradients: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for unit in self._units:
            parameters, gradients = (slot.owner is not None for slot in (unit.slot, unit.gradients.slot))
            if gradients:
                self.had_gradients.add(unit.name)
            if parameters and gradients:
                self.found.add(unit.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["fsdp", "yafsdp"])
def test_gradients_take_a_slot_after_the_parameters_gave_theirs_up(mode: str) -> None:
    """Where the head is as large as several blocks, all three of its buffers at once would be the step's peak."""
    model = make_net()
    refshard.shard(model, mode=mode, collectives=LateCollectives())
    for number in range(3):
        loss_of(model, make_batch(number)).backward()
    transient = [unit for unit in engine_of(model).units if not unit.gradients.slot.accumulates]
    with Together(transient) as seen:
        loss_of(model, make_batch(3)).backward()
    assert seen.had_gradients == {unit.name for unit in transient} >= {"embed", "norm+head"}
    assert seen.found == set()
