"""Modules of factories under every strategy that takes any module, on two ranks."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refshard.errors import UnsupportedError
from refshard.records import parity_tolerance
from refshard.specs.case import Case
from refshard.strategies import make_strategy, strategy_for
from refshard.strategies.table import ROWS
from tests.distributed.ranks import run_ranks
from tests.strategies.test_strategies import observe

HERE = "tests.strategies.test_own_models"
TAKEN = [
    "ddp", "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp2", "fsdp2-prefetch2", "refshard-replicate",
    "refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp",
]  # fmt: skip
MODELS = ["untied", "tied", "around", "named"]
STEPS = 3


class Net(nn.Module):
    """Embedding, blocks with dropout and buffers, and a head; ``tied`` and ``around`` say what encloses the blocks."""

    def __init__(self, tied: bool = False, around: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        self.embedding = nn.Embedding(50, 16)
        self.position = nn.Parameter(torch.randn(8, 16)) if around else None
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + (0 if self.position is None else self.position)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def draw(sequences: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"tokens": torch.randint(50, (sequences, seq_len), generator=generator)}


def untied() -> Any:
    return Net(), draw


def tied() -> Any:
    return Net(tied=True), draw


def around() -> Any:
    return Net(around=True), draw


def named() -> Any:
    return Net(), draw, ["blocks.0", "blocks.2"]


def case_of(model: str, strategy: str, **changes: Any) -> Case:
    ranks = 1 if strategy == "single" else 2
    fields: dict[str, Any] = {
        "strategy": strategy, "gpus": ranks, "model": f"{HERE}:{model}", "global_batch": 4, "seq_len": 8,
    }  # fmt: skip
    return Case.of(**{**fields, **changes})


def train(cases: list[Case]) -> list[dict[str, Any]]:
    return [observe(strategy_for(case, cuda=False), case, None) for case in cases]


def keys() -> list[tuple[str, str, int]]:
    plain = [(model, strategy, 1) for model in MODELS for strategy in TAKEN]
    return plain + [("tied", strategy, 2) for strategy in TAKEN]


@cache
def trained() -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """What each rank observed of each case."""
    ranks = run_ranks(2, train, [case_of(model, strategy, microbatches=parts) for model, strategy, parts in keys()])
    return dict(zip(keys(), zip(*ranks)))  # type: ignore[arg-type]


@cache
def alone(model: str) -> dict[str, Any]:
    (found,) = run_ranks(1, train, [case_of(model, "single")])
    (of_model,) = found
    return dict(of_model)


@pytest.mark.processes
@pytest.mark.parametrize(("model", "strategy", "parts"), keys())
def test_losses_are_those_of_one_rank_and_collectives_are_announced(model: str, strategy: str, parts: int) -> None:
    ranks, reference = trained()[model, strategy, parts], alone(model)
    losses = [sum(step) / 2 for step in zip(*(rank["losses"] for rank in ranks))]
    assert losses == pytest.approx(reference["losses"], rel=parity_tolerance(case_of(model, strategy)))
    assert ranks[0]["announced"] == ranks[0]["counted"]
    assert ranks[0]["parameters"].keys() == reference["parameters"].keys()
    for name, value in reference["parameters"].items():
        torch.testing.assert_close(ranks[0]["parameters"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.processes
def test_units_are_the_blocks_that_are_found_or_named() -> None:
    found = trained()["untied", "fsdp2", 1][0]["units"]
    assert {"blocks.0", "blocks.1", "blocks.2"} <= set(found)
    assert set(trained()["named", "fsdp2", 1][0]["units"]) == {"root", "blocks.0", "blocks.2"}
    assert trained()["tied", "refshard-fsdp", 1][0]["units"] == ("embedding+head", "blocks.0", "blocks.1", "blocks.2")


def test_the_rows_that_take_any_module() -> None:
    rows = {name for name, row in ROWS.items() if "own model" in row.axes}
    assert {*TAKEN, "single"} <= rows
    assert not {"fsdp2-tuned", "pipeline", "tensor-parallel", "accelerate", "simplefsdp", "fsdp2-compiled"} & rows


@pytest.mark.parametrize(
    ("strategy", "changes", "words"),
    [
        ("fsdp2-tuned", {}, "refshard does not support fsdp2-tuned with own model"),
        ("fsdp2", {"tuning": "lora"}, "tuning = 'lora' needs one of refshard's Llamas"),
        ("fsdp2", {"optimizer": "muon"}, "optimizer = 'muon' needs one of refshard's Llamas"),
        ("fsdp2", {"checkpointing": "selective"}, "checkpointing = 'selective' needs"),
        ("fsdp2", {"gpus": 4, "tp": 2}, "tp = 2 needs"),
    ],
)
def test_what_needs_a_llama_is_unsupported_with_the_reason(strategy: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        strategy_for(case_of("untied", strategy, **changes), cuda=False)
    assert make_strategy(strategy)
