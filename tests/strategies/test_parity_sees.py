"""What loss parity sees: the scale of gradients, which AdamW all but hides with torch's epsilon; and of Muon, which has
no scale, whether it steps whole matrices.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.records import parity_tolerance
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.strategies.optimizer import MakeWhole, make_optimizer, unsharded

CASE = Case.of(strategy="single", gpus=1, model="llama-tiny", global_batch=2, seq_len=64, device="cpu")


def losses(case: Case, scale: float = 1, whole: MakeWhole = unsharded) -> list[float]:
    spec = load_model(case.job.model)
    model = Llama(spec)
    initialise(model, case.protocol.seed)
    optimizer = make_optimizer(model, case, whole)
    found = []
    for step in range(case.protocol.warmup_steps):
        tokens = torch.randint(0, spec.vocab, (2, 65), generator=torch.Generator().manual_seed(step))
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def apart(case: Case, right: list[float], wrong: list[float]) -> float:
    """The largest relative difference of two losses, over what loss parity allows."""
    return max(abs(a - b) / a for a, b in zip(right, wrong)) / parity_tolerance(case)


@pytest.mark.processes
@pytest.mark.parametrize(("optimizer", "least"), [("adamw", 10), ("adafactor", 2), ("sgd", 10)])
def test_a_sum_over_two_ranks_in_place_of_the_mean_is_no_parity(optimizer: str, least: float) -> None:
    case = CASE.changed(optimizer=optimizer)
    right = losses(case)
    for scale in (2, 0.5):
        assert apart(case, right, losses(case, scale)) > least


class MuonOfHalves(torch.optim.Muon):
    """Muon over the upper and the lower half of each matrix, as ranks would step that take rows for matrices."""

    def __init__(self, matrices: Sequence[nn.Parameter], **options: Any) -> None:
        self._matrices = matrices
        super().__init__([half for matrix in matrices for half in matrix.detach().chunk(2)], **options)

    def step(self, closure: Any = None) -> Any:
        gradients = [matrix.grad for matrix in self._matrices]
        halves = [half for gradient in gradients if gradient is not None for half in gradient.chunk(2)]
        for half, gradient in zip(self.param_groups[0]["params"], halves):
            half.grad = gradient
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for matrix in self._matrices:
            matrix.grad = None


@pytest.mark.processes
def test_muon_over_rows_in_place_of_matrices_is_no_parity() -> None:
    case = CASE.changed(optimizer="muon")
    right = losses(case)
    assert apart(case, right, losses(case, 1 + 1e-7)) < 0.2, "the last bits of gradients"
    assert apart(case, right, losses(case, whole=lambda _, matrices, **options: MuonOfHalves(matrices, **options))) > 2
