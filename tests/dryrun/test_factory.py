"""``refshard.dry_run``: a function and a batch in, a prediction out."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refshard
from refshard.errors import SpecError
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]
WIDTH = 4096


class Holds(nn.Module):
    """Holds 1 GiB for each row of a batch between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), device="cuda"))

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.ones(len(tokens), 2**28, device="cuda")
        return rows * self.weight * (1 if scale is None else scale)


def build() -> nn.Module:
    """One on its GPU, with what torchrun would say of the ranks."""
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == 8
    return Holds()


def build_with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """And an optimizer."""
    model = build()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def total(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that reads the batch."""
    return output.sum() * batch["scale"].sum()


def test_a_model_that_fits(dry_run: Callable[..., Any]) -> None:
    found = dry_run(build, torch.zeros(4, 16, dtype=torch.long), cluster="dgx-h100")
    assert found.fits
    assert found.reserved_bytes // 2**30 == 16  # the rows, two products and a gradient, each of 4 GiB
    assert found.tokens_per_s == pytest.approx(4 * 16 / found.step_s)


def test_a_model_that_does_not_fit_says_why() -> None:
    found = refshard.dry_run(build, torch.zeros(60, 16, dtype=torch.long), cluster="dgx-h100", gpus=1)
    assert found.fits is False
    assert found.why.startswith("needs 240 GiB")


def test_keyword_arguments_a_loss_and_an_optimizer() -> None:
    batch = {"tokens": torch.zeros(2, 16, dtype=torch.long), "scale": torch.zeros(1)}
    found = refshard.dry_run(build_with_optimizer, batch, cluster="dgx-h100", gpus=1, loss=total)
    assert found.fits, found.why


def test_what_no_other_process_can_find_is_refused() -> None:
    with pytest.raises(SpecError, match=r"a function that another process can import, got '.*<lambda>'; define it"):
        refshard.dry_run(lambda: 1, torch.zeros(1), cluster="dgx-h100")


def test_an_error_in_the_function_is_the_reason() -> None:
    found = refshard.dry_run(nn.Module, torch.zeros(1), cluster="dgx-h100", gpus=1)
    assert found.fits is None
    assert "optimizer got an empty parameter list" in found.why


@pytest.mark.parametrize("as_program", [True, False])
def test_functions_of_a_program_and_of_a_notebook(tmp_path: Path, as_program: bool) -> None:
    text = (
        "import torch, refshard\n"
        "def build():\n    import torch\n    return torch.nn.Linear(8, 8, device='cuda')\n"
        "if __name__ == '__main__':\n"
        "    print(refshard.dry_run(build, torch.zeros(2, 8), cluster='dgx-h100', gpus=1).fits)\n"
    )
    (tmp_path / "program.py").write_text(text)
    # A notebook keeps the source of its cells in linecache, and its __main__ has no file.
    notebook = (
        "import linecache, sys; text = open('program.py').read(); del sys.modules['__main__'].__dict__['__file__']\n"
        "linecache.cache['<cell>'] = (len(text), None, text.splitlines(True), '<cell>')\n"
        "exec(compile(text, '<cell>', 'exec'))\n"
    )
    (tmp_path / "notebook.py").write_text(notebook)
    name = "program.py" if as_program else "notebook.py"
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
