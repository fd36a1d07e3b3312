"""Loss parity sees the scale of gradients, which AdamW all but hides with torch's epsilon."""

import pytest
import torch

from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.records import parity_tolerance
from refshard.specs.case import CaseSpec
from refshard.specs.model import load_model
from refshard.strategies.optimizer import make_optimizer

CASE = CaseSpec(strategy="single", world_size=1, model="llama-tiny", global_batch=2, seq_len=64, device="cpu")


def losses(scale: float) -> list[float]:
    spec = load_model(CASE.model)
    model = Llama(spec)
    initialise(model, CASE.seed)
    optimizer = make_optimizer(model, CASE)
    found = []
    for step in range(CASE.warmup_steps):
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


@pytest.mark.processes
def test_a_sum_over_two_ranks_in_place_of_the_mean_is_no_parity() -> None:
    right = losses(1)
    for scale in (2, 0.5):
        wrong = losses(scale)
        assert max(abs(a - b) / a for a, b in zip(right, wrong)) > 10 * parity_tolerance(CASE)
