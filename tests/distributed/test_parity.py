"""Every mode at every world size with every feature, against one unsharded rank and against torch's DDP and FSDP2.

Losses of fp32 are within 1e-6 of one rank's and each gradient within 1e-5 of its norm, over 12 steps (splitting the
batch alone costs 1.8e-6 in 20); one rank equals the bare model to the bit, and two ranks their peers, masters
included.

``make test`` runs a pairwise cover of mode, world size and feature, ``make full`` every cell. The ranks of one world
size train all their cells in one launch.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.distributed.cover import pairs_of, pairwise_cover
from tests.distributed.parity_features import CELLS, FEATURES, STEPS, WORLD_SIZES, Cell
from tests.distributed.parity_train import (
    CLIPPING,
    INFINITE_GRADIENT,
    INFINITE_LOSS,
    Alone,
    Trace,
    train,
    train_or_tell,
)
from tests.distributed.ranks import run_each

pytestmark = pytest.mark.processes

COVER = pairwise_cover(CELLS)
Launched = list[dict[tuple[str, str], Trace | str]]
"""Per rank, traces by (mode or peer, feature), or in place of one the traceback of an exception."""
Launch = Callable[[int, bool], Launched]


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Train the cover's cells of a world size, or all of them; each launched once.

    In the cover each feature has one peer, and that where two ranks must equal it to the bit, or where a feature asks
    for a mesh.
    """

    @functools.cache
    def attempt(world_size: int, whole: bool) -> Launched | Exception:
        cells = [cell for cell in (CELLS if whole else COVER) if cell.world_size == world_size]
        runs = [(cell.mode, cell.feature) for cell in cells]
        for name in dict.fromkeys(cell.feature for cell in cells):
            if whole or world_size == 2 or FEATURES[name].mesh:
                runs += [(peer, name) for peer in FEATURES[name].peers_at(world_size)[: None if whole else 1]]
        try:
            return [dict(zip(runs, found)) for found in run_each(world_size, train_or_tell, runs)]
        except Exception as error:
            return error

    def launched(world_size: int, whole: bool) -> Launched:
        found = attempt(world_size, whole)
        if isinstance(found, Exception):
            raise found
        return found

    return launched


@functools.cache
def train_alone(feature: str) -> Trace:
    return train(Alone(FEATURES[feature]), FEATURES[feature])


@dataclass(frozen=True)
class Run:
    """One way of training as all ranks saw it; ``gradients`` are whole, a row per step."""

    ranks: tuple[Trace, ...]
    gradients: dict[str, torch.Tensor]

    @property
    def first(self) -> Trace:
        """What the first rank saw."""
        return self.ranks[0]


def run_alone(feature: str) -> Run:
    trace = train_alone(feature)
    return Run((trace,), trace.gradients)


def run_of(launched: Launched, way: str, name: str) -> Run:
    """Join the ranks' parts of each gradient. What replicas hold must be equal."""
    traces = []
    for rank, found in enumerate(launched):
        trace = found[way, name]
        assert isinstance(trace, Trace), f"rank {rank} of {way}: {trace}"
        traces.append(trace)
    mesh = FEATURES[name].mesh
    replicas = len(traces) if way in ("replicate", "ddp") else mesh[0] if mesh else 1
    rows = torch.arange(len(traces)).view(replicas, -1).tolist()
    joined = [
        {name: torch.cat([traces[rank].gradients[name] for rank in row], 1) for name in traces[0].gradients}
        for row in rows
    ]
    for other in joined[1:]:
        assert all(torch.equal(other[name], value) for name, value in joined[0].items())
    for trace in traces[1:]:
        assert (trace.losses, trace.steps, trace.scales) == (traces[0].losses, traces[0].steps, traces[0].scales)
        assert all(torch.equal(trace.masters[name], value) for name, value in traces[0].masters.items())
    return Run(tuple(traces), joined[0])


def assert_close(run: Run, expected: Run, *, loss: float, gradient: float) -> None:
    mine, theirs = run.first, expected.first
    assert mine.losses == pytest.approx(theirs.losses, rel=loss)
    assert mine.steps == theirs.steps, "which parameters had gradients, and when"
    assert mine.norms == pytest.approx(theirs.norms, rel=gradient)
    assert mine.scales == theirs.scales
    assert mine.masters.keys() == theirs.masters.keys()
    for name, value in run.gradients.items():
        distance = (value - expected.gradients[name]).norm(dim=1) / expected.gradients[name].norm(dim=1)
        assert distance.max() <= gradient, f"gradient of {name}"
    for name, value in mine.masters.items():
        if name in mine.steps:
            # An AdamW step is at most about lr = 0.01 long; in 16 bits the sign of a tiny gradient may differ.
            assert torch.allclose(value, theirs.masters[name], rtol=0, atol=min(0.3 * gradient, 0.05)), (
                f"master of {name}"
            )
        else:
            assert torch.equal(value, theirs.masters[name]), f"{name} had no gradient, and must not have moved"
    for logits, others in zip(mine.logits, theirs.logits, strict=True):
        assert torch.allclose(logits, others, rtol=0, atol=10 * gradient)


def assert_equal(run: Run, expected: Run) -> None:
    mine, theirs = run.first, expected.first
    assert mine.losses == theirs.losses
    assert mine.steps == theirs.steps
    assert all(torch.equal(value, expected.gradients[name]) for name, value in run.gradients.items())
    assert all(torch.equal(value, theirs.masters[name]) for name, value in mine.masters.items())
    assert all(torch.equal(logits, others) for logits, others in zip(mine.logits, theirs.logits, strict=True))


def hold(cell: Cell, launched: Launched) -> None:
    """Hold one cell against one rank and against the peers that were launched."""
    feature, run, alone = FEATURES[cell.feature], run_of(launched, cell.mode, cell.feature), run_alone(cell.feature)
    assert_close(run, alone, loss=feature.loss, gradient=feature.gradient)
    if cell.world_size == 1 and feature.exact:
        assert_equal(run, alone)
    for peer in feature.peers:
        if (peer, cell.feature) in launched[0]:
            other = run_of(launched, peer, cell.feature)
            assert_close(run, other, loss=feature.peer_loss, gradient=feature.peer_gradient)
            if cell.world_size == 2 and feature.peers_exact:
                assert_equal(run, other)
    varies = cell.feature == "runs now and then"
    for trace in run.ranks:
        assert (trace.order, len(trace.warned)) == (("ON_DEMAND", 1) if varies else ("FOLLOWING", 0))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell.world_size <= 2 else pytest.mark.full) for cell in COVER],
    ids=lambda cell: cell.id,
)
def test_parity(cell: Cell, launch: Launch) -> None:
    hold(cell, launch(cell.world_size, False))


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_parity_of_the_whole_matrix(cell: Cell, launch: Launch) -> None:
    hold(cell, launch(cell.world_size, True))


def test_the_cover_meets_every_pair() -> None:
    assert {pair for cell in COVER for pair in pairs_of(cell)} == {pair for cell in CELLS for pair in pairs_of(cell)}
    assert len(COVER) < len(CELLS) / 3
    assert {cell.world_size for cell in CELLS} == set(WORLD_SIZES)


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if feature.clip])
def test_every_step_is_clipped(name: str) -> None:
    """Else the feature would clip nothing."""
    norms = train_alone(name).norms
    assert len(norms) == STEPS
    assert all(norm > limit for norm, (_, limit) in zip(norms, itertools.cycle(CLIPPING)))


def test_planted_infinities_halve_the_scale_and_leave_the_masters_alone() -> None:
    """The scale doubles after each four good steps."""
    scales = train_alone("fp16 scaled").scales
    halved = [step for step, (before, after) in enumerate(itertools.pairwise([2.0**8, *scales])) if after < before]
    assert halved == [INFINITE_LOSS, INFINITE_GRADIENT]


def test_what_never_runs_has_no_gradient() -> None:
    steps = train_alone("never runs").steps
    assert not any(name.startswith("layers.2.") or "spare" in name for name in steps)
    now_and_then = train_alone("runs now and then").steps["layers.2.up.weight"]
    assert now_and_then == [step for step in range(STEPS) if step % 5]
