"""Factories: what is found and accepted, what is refused in which words, and what torch counts of their modules."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refshard.errors import SpecError
from refshard.flops import flops_per_token
from refshard.models.counted import count_flops
from refshard.models.data import Tokens
from refshard.models.llama import Llama
from refshard.models.own import Arguments, OwnModel, build_own, factory_file, find_factory
from refshard.specs.model import is_factory
from tests.models import small_spec

CPU = torch.device("cpu")
HERE = "tests.models.test_own"


class Squares(nn.Module):
    """A mean over samples."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=dtype)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers[0](x).square().mean()
        return found


def draw(sequences: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(sequences, 4, generator=generator)}


def build() -> Any:
    return Squares(), draw


def with_blocks() -> Any:
    return Squares(), draw, ["layers.0"]


def bare() -> Any:
    return Squares()


def no_module() -> Any:
    return 3, draw


def no_function() -> Any:
    return Squares(), {"x": torch.zeros(1)}


def in_bf16() -> Any:
    return Squares(torch.bfloat16), draw


not_callable = 3


@pytest.mark.parametrize("name", ["mymodels:build", "a.b_c.d:Models.build", "_x:y"])
def test_a_factory_is_told_by_its_colon(name: str) -> None:
    assert is_factory(name)


@pytest.mark.parametrize(
    "name", ["llama3-8b", "mine.toml", "odd:name.toml", "odd:name.json", "a:", ":b", "a b:c", "a/b"]
)
def test_all_other_names_are_none(name: str) -> None:
    assert not is_factory(name)


def test_two_ranks_build_the_same_and_their_rows_are_the_whole_batch() -> None:
    first, second = (build_own(f"{HERE}:build", 3, CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters()))
    assert not torch.equal(*(next(build_own(f"{HERE}:build", s, CPU).module.parameters()) for s in (3, 4)))
    whole = first.batch(7, 4, 1, range(4), CPU).tensors["x"]
    halves = [second.batch(7, 4, 1, rows, CPU).tensors["x"] for rows in (range(2), range(2, 4))]
    assert torch.equal(whole, torch.cat(halves))
    assert not torch.equal(whole, first.batch(8, 4, 1, range(4), CPU).tensors["x"])


def test_blocks_may_be_named_and_the_module_may_lie_anywhere_on_the_path() -> None:
    assert build_own(f"{HERE}:build", 0, CPU).blocks is None
    assert build_own(f"{HERE}:with_blocks", 0, CPU).blocks == ["layers.0"]
    assert factory_file(f"{HERE}:build") == Path(__file__)


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # restores the path afterwards
    (tmp_path / "only_here.py").write_text("def build(): return 5")
    monkeypatch.chdir(tmp_path)
    assert find_factory("only_here:build")() == 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package.models:build", "needs the module 'no_such_package', found neither in"),
        (f"{HERE}.deeper:build", f"needs the module '{HERE}.deeper'"),
        (f"{HERE}:buidl", f"'{HERE}' has no 'buidl'; did you mean 'build'?"),
        (f"{HERE}:not_callable", "must be a function, got int"),
        (f"{HERE}:bare", "must return (module, batch) or (module, batch, blocks), got Squares"),
        (f"{HERE}:no_module", "must return (module, batch) or (module, batch, blocks), got (int, function)"),
        (f"{HERE}:no_function", "must be a function, got dict"),
        (f"{HERE}:in_bf16", "must be torch.float32, got torch.bfloat16 for 'layers.0.weight'"),
    ],
)
def test_a_mistake_is_one_line_with_the_rule_and_the_value(name: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        build_own(name, 0, CPU)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import no_such_dependency",
            "importing 'torn' fails: ModuleNotFoundError: No module named 'no_such_dependency'",
        ),
        ("1 / 0", "importing 'torn' fails: ZeroDivisionError: division by zero; correct it"),
        ("def build(:", "importing 'torn' fails: SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError) as refused:
        find_factory("torn:build")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda *_: {"x": torch.zeros(3, 4)}, "whose first dimension is 2, got (3, 4) for 'x'"),
        (lambda *_: {"x": torch.zeros(())}, "got () for 'x'"),
        (lambda *_: {"x": 1}, "got int for 'x'"),
        (lambda *_: torch.zeros(2, 4), "must be a dict of tensors whose first dimension is 2, got Tensor;"),
    ],
)
def test_a_batch_must_have_a_row_for_each_sequence(batch: Callable[..., Any], words: str) -> None:
    own = OwnModel(factory="m:f", module=Squares(), make_batch=batch, blocks=None)
    with pytest.raises(SpecError) as refused:
        own.batch(0, 2, 1, range(2), CPU)
    assert words in str(refused.value)


class Answers(nn.Module):
    """Returns what it is told to."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, **_: Tensor) -> Any:
        return self.answer


@pytest.mark.parametrize(
    "answer", [torch.tensor(2.0), torch.tensor([2.0]), SimpleNamespace(loss=torch.tensor(2.0), logits=torch.zeros(9))]
)
def test_the_loss_is_a_scalar_or_an_attribute(answer: Any) -> None:
    loss = Arguments({}, "m:f").loss(Answers(answer))
    assert (loss.shape, loss.item()) == ((), 2.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (torch.zeros(2, 3), "got a tensor of shape (2, 3)"),
        (SimpleNamespace(logits=1), "got SimpleNamespace"),
        (SimpleNamespace(loss=torch.zeros(2)), "got a tensor of shape (2,)"),
        (None, "got NoneType"),
    ],
)
def test_anything_else_is_refused(answer: Any, words: str) -> None:
    with pytest.raises(SpecError, match="the forward of 'm:f' must return the loss, a scalar tensor") as refused:
        Arguments({}, "m:f").loss(Answers(answer))
    assert words in str(refused.value)


def test_microbatches_are_rows_in_order() -> None:
    x, y = torch.arange(8).view(4, 2), torch.arange(4)
    parts = Arguments({"x": x, "y": y}, "m:f").split(2)
    assert [(part.tensors["x"].tolist(), part.tensors["y"].tolist()) for part in parts] == [
        ([[0, 1], [2, 3]], [0, 1]), ([[4, 5], [6, 7]], [2, 3]),
    ]  # fmt: skip
    tokens = Tokens(x, x + 1).split(4)
    assert [(part.inputs.tolist(), part.targets.tolist()) for part in tokens][3] == ([[6, 7]], [[7, 8]])


class Inherited(nn.Module):
    """A Llama whose forward takes a batch and returns its loss; ``ask`` a question about integers first."""

    def __init__(self, ask: bool = False) -> None:
        super().__init__()
        self.llama = Llama(small_spec(n_kv_heads=2))
        self.ask = ask
        self.start: Tensor
        self.register_buffer("start", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.ask:
            positions = torch.arange(inputs.shape[1], device=inputs.device) + self.start
            if (positions.diff() != 1).any() or inputs.max() >= 256:
                raise ValueError("positions must follow each other")
        return Tokens(inputs, targets).loss(self.llama)


def own_llama(module: nn.Module) -> OwnModel:
    def batch(sequences: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(256, (sequences, seq_len), generator=generator)
        return {"inputs": tokens, "targets": tokens}

    return OwnModel(factory="m:f", module=module, make_batch=batch, blocks=None)


@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_what_is_counted_of_a_llama_is_convention_a_less_the_norms(ask: bool, backward: bool) -> None:
    spec, seq_len = small_spec(n_kv_heads=2), 32
    norms = (2 * spec.n_layers + 1) * spec.dim * (6 if backward else 2)
    exact = flops_per_token(spec, seq_len, "A", "training" if backward else "inference") - norms
    assert count_flops(own_llama(Inherited(ask)), seq_len, backward=backward) == exact


def test_frozen_weights_have_no_gradient_to_count() -> None:
    module = Inherited()
    module.llama.lm_head.requires_grad_(False)
    spec, seq_len = small_spec(n_kv_heads=2), 32
    trained = count_flops(own_llama(Inherited()), seq_len, backward=True)
    assert trained - count_flops(own_llama(module), seq_len, backward=True) == 2 * spec.dim * spec.vocab


def test_a_module_that_asks_for_a_value_that_depends_on_weights_is_not_counted() -> None:
    class Curious(Inherited):
        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            if self.llama.lm_head.weight.sum() > 0:
                return super().forward(inputs, targets) * 2
            return super().forward(inputs, targets)

    with pytest.raises(RuntimeError, match="item"):
        count_flops(own_llama(Curious()), 32, backward=True)


def test_counting_computes_nothing_and_changes_nothing() -> None:
    module = Inherited()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    count_flops(own_llama(module), 8, backward=True)
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
