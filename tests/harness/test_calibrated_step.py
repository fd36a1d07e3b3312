"""The check against reality: a training step predicted, from shapes alone, with what a calibration measured here.

Not of the gate, which leaves no core idle. Two ranks compute at once, and a step is timed by the time that its thread
ran.
"""

import time
from collections.abc import Iterator
from statistics import median

import pytest
import torch

from refshard.costs import (
    attention_seconds,
    first_touch_seconds,
    move_seconds,
    optimizer_seconds,
    product_seconds,
)
from refshard.harness.calibrate import calibrate, plan_calibration
from refshard.harness.launchers.local import LocalLauncher
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.specs.hardware import HardwareSpec
from refshard.specs.model import ModelSpec, load_model
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.processes

E = 4


def predicted_step(hw: HardwareSpec, spec: ModelSpec, n: int) -> float:
    """Seconds of a step on ``n`` tokens of one fp32 sequence: blocks, head and loss, fused AdamW."""
    return spec.n_layers * sum(_block(hw, spec, n)) + sum(_ends(hw, spec, n)) + optimizer_seconds(hw, spec.params)


def _products(hw: HardwareSpec, m: int, k: int, n: int) -> float:
    """A linear layer's three products: forward, and both gradients."""
    return 3 * product_seconds(hw, "fp32", 2.0 * m * k * n, E * (m * k + k * n + m * n))


def _block(hw: HardwareSpec, spec: ModelSpec, n: int) -> Iterator[float]:
    D, F, K, H = spec.dim, spec.ffn_dim, spec.n_kv_heads * spec.head_dim, spec.n_heads
    for width in (D, K, K, D):
        yield _products(hw, n, D, width)
    yield from (_products(hw, n, D, F), _products(hw, n, D, F), _products(hw, n, F, D))
    yield attention_seconds(hw, "fp32", heads=H, seq_len=n, head_dim=spec.head_dim)
    yield attention_seconds(hw, "fp32", heads=H, seq_len=n, head_dim=spec.head_dim, backward=True)
    # Numbers read and written by each eager kernel. On a CPU a norm is six of them forward and thirteen backward.
    norm = [2 * n * D, n * D, 0, 0, 2 * n * D, 2 * n * D] + [3 * n * D] * 3 + [n * D] * 3 + [2 * n * D] * 4 + [0] * 3
    rotation = [moved * n * width for width in (D, K) for moved in (2, 2, 3, 2, 2, 2, 3, 0)]
    residuals = [3 * n * D] * 9  # two sums forward, seven of gradients backward
    for numbers in [*norm * 2, *rotation, *residuals, *[3 * n * F] * 3]:
        yield move_seconds(hw, E * numbers)
    yield move_seconds(hw, E * 2 * n * F, n * F)  # SiLU
    yield move_seconds(hw, E * 3 * n * F, n * F)


def _ends(hw: HardwareSpec, spec: ModelSpec, n: int) -> Iterator[float]:
    D, V = spec.dim, spec.vocab
    yield _products(hw, n, D, V)
    for numbers in (2, 1, 0, 0, 2, 2, 3, 3, 3, 1, 1, 1, 2, 2, 2, 2):  # the final norm
        yield move_seconds(hw, E * numbers * n * D)
    yield move_seconds(hw, 2 * E * n * V, 2 * n * V)  # logarithm of softmax
    yield move_seconds(hw, E * n * V)  # its gradient: zeros but for the targets, then that of softmax
    yield move_seconds(hw, 3 * E * n * V, 1.5 * n * V)
    yield move_seconds(hw, 2 * E * n * D) + move_seconds(hw, E * V * D) + move_seconds(hw, 3 * E * n * D)  # embedding
    # Logits, their two gradients and the head's are too large for the allocator to keep.
    yield 3 * first_touch_seconds(hw, E * n * V) + first_touch_seconds(hw, E * V * D)


def measured_step(name: str, n: int, steps: int) -> float:
    """Median seconds of a step on this rank, while the other one computes the same."""
    spec = load_model(name)
    model = Llama(spec)
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, spec.vocab, (1, n + 1), generator=torch.Generator().manual_seed(0))
    taken = []
    for _ in range(steps):
        started = time.thread_time()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.thread_time() - started)
    return median(taken[2:])


@pytest.mark.full
def test_a_step_takes_what_the_calibration_predicts() -> None:
    plan = plan_calibration(ranks=2, threads=1, network=None, device="cpu", quick=False)
    hardware = calibrate(plan, LocalLauncher(), print).accelerator
    for name, tokens, steps in (("llama-mini", 512, 9), ("llama-tiny", 256, 30)):
        measured = run_ranks(2, measured_step, name, tokens, steps)
        predicted = predicted_step(hardware, load_model(name), tokens)
        print(f"{name}: predicted {predicted:.4f} s, measured {measured}")
        assert predicted == pytest.approx(sum(measured) / 2, rel=0.1), name
