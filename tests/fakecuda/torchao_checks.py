"""torchao and optimizers with little state in a dry run, for :mod:`tests.fakecuda.test_torchao`."""

import gc
import sys
from typing import Any

import torch
from torch import nn

from refshard.dryrun.recording import Kind, collect
from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check

OUT, IN = 4096, 1024
ext = sys.modules[NAME]


def requested() -> int:
    gc.collect()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.empty(OUT, IN, device="cuda", dtype=torch.bfloat16))
    made.grad = torch.empty_like(made)
    return made


class LowRank(torch.optim.Optimizer):
    """As GaLore: moments of the gradient in the space of its largest singular vectors."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, {"rank": rank})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    vectors, _, _ = torch.linalg.svd(p.grad.float(), full_matrices=False)
                    state["basis"] = vectors[:, : group["rank"]].to(p.dtype)
                    state["first"], state["second"] = (torch.zeros_like(state["basis"].t() @ p.grad) for _ in range(2))
                low = state["basis"].t() @ p.grad
                state["first"].lerp_(low, 0.1)
                state["second"].lerp_(low.square(), 0.001)
                p.sub_(state["basis"] @ (state["first"] / (state["second"].sqrt() + 1e-8)))


@check
def optimizer_state() -> dict[str, int]:
    from torchao import optim
    from transformers.optimization import Adafactor

    # torchao compiles its updates, which is no matter of state.
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    made: dict[str, Any] = {
        "AdamW8bit": lambda p: optim.AdamW8bit([p]),
        "AdamW4bit": lambda p: optim.AdamW4bit([p]),
        "AdamWFp8": lambda p: optim.AdamWFp8([p]),
        "CPUOffloadOptimizer": lambda p: optim.CPUOffloadOptimizer([p], torch.optim.AdamW),
        "Adafactor": lambda p: torch.optim.Adafactor([p]),
        "Adafactor of transformers": lambda p: Adafactor([p]),
        "Muon": lambda p: torch.optim.Muon([p]),
        "low rank": lambda p: LowRank([p], 128),
    }
    _ = torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # which makes cuBLAS' workspace
    found = {}
    for name, make in made.items():
        weight = parameter()
        optimizer = make(weight)
        before = requested()
        optimizer.step()
        found[name] = requested() - before
    return found


@check
def nf4() -> dict[str, Any]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    before = requested()
    weight = to_nf4(torch.empty(OUT, IN, device="cuda", dtype=torch.bfloat16))
    held = requested() - before
    x = torch.ones(512, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = linear_nf4(x, weight)
    out.sum().backward()
    assert x.grad is not None
    return {"held": held, "out": list(out.shape), "gradient": list(x.grad.shape)}


@check
def float8() -> list[str]:
    """Operands of the matrix products of a layer that trains in fp8."""
    from torchao.float8 import convert_to_float8_training

    model = nn.Sequential(nn.Linear(IN, OUT, bias=False)).to("cuda", torch.bfloat16)
    convert_to_float8_training(model)
    ext.record(True)
    model(torch.ones(512, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    ext.record(False)
    made = collect(ext, 0, 1)
    return [
        " ".join(made.signature_table[made.signatures[row]].split()[:2])
        for row in range(len(made))
        if made.kinds[row] == Kind.LAUNCH and made.name_table[made.names[row]] == "aten::_scaled_mm"
    ]
