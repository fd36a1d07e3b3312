"""Muon for the matrices of the blocks and AdamW for all else, stepped as one optimizer.

That is how practitioners train with it: an embedding, a head and a norm are no matrices between hidden layers. One
learning rate serves both, since ``match_rms_adamw`` gives Muon's updates the size of AdamW's.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from refshard.specs.case import CaseSpec

MakeMuon = Callable[..., torch.optim.Optimizer]
"""What makes Muon of a list of matrices and Muon's options: ``torch.optim.Muon``, or the engine's way to it."""


def block_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of attention and feed-forward of a Llama, in whatever it is wrapped."""
    named = module.named_parameters()
    return [p for name, p in named if p.ndim == 2 and (".self_attn." in name or ".mlp." in name) and p.requires_grad]


def muon_options(case: CaseSpec) -> dict[str, Any]:
    """Muon's options, where they are not torch's defaults."""
    return {"lr": case.learning_rate, "adjust_lr_fn": "match_rms_adamw"}


@final
class Together(torch.optim.Optimizer):
    """Optimizers over different parameters that step as one; each keeps its own state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each part."""
        assert closure is None, "each part would evaluate it"
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See :meth:`torch.optim.Optimizer.zero_grad`; a part may hold gradients of its own."""
        for part in self._parts:
            part.zero_grad(set_to_none)
