"""A small mixture of experts on four ranks: memory of the first one, for :mod:`tests.fakecuda.test_routing`.

In a dry run an assumption routes its tokens. In host compute all four ranks run, and are made to route them alike.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from refshard.dryrun.recording import Category, Kind
from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check

RANKS, EXPERTS, TOP_K, TOKENS, DIM = 4, 8, 2, 1200, 64
SHARES = {
    "balanced": [300] * EXPERTS,
    # 1/i of 2400 * (1 + 1/2 + ... + 1/8)^-1 = 883.04 for the first, and so on; the largest remainders are rounded up.
    "zipf": [883, 442, 294, 221, 177, 147, 126, 110],
    "worst": [TOKENS] * TOP_K + [0] * (EXPERTS - TOP_K),
}
"""Tokens of each expert, by hand."""
ext: Any = sys.modules.get(NAME)  # none where pytest imports the figures


def example() -> Any:
    path = Path(__file__).parents[2] / "docs/examples/train_moe.py"
    spec = importlib.util.spec_from_file_location("train_moe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def routed(rule: str) -> torch.Tensor:
    """Experts of each token: each expert comes as often as its share says, and never twice for a token."""
    slots = [expert for expert, share in enumerate(SHARES[rule]) for _ in range(share)]
    return torch.tensor(slots).view(TOP_K, TOKENS).t().contiguous()


def peak(columns: dict[str, Any]) -> int:
    """The most bytes that live at once, without kernels' workspaces, which host compute does not take."""
    live = most = 0
    blocks: dict[int, int] = {}
    for kind, block, size, category in zip(
        columns["kinds"], columns["subjects"], columns["sizes"], columns["categories"]
    ):
        if kind == Kind.ALLOCATE and category != Category.WORKSPACE:
            blocks[block] = size
            live += size
            most = max(most, live)
        elif kind == Kind.FREE:
            live -= blocks.pop(block, 0)
    return int(most)


@check
def peaks() -> dict[str, list[Any]]:
    """Of one step under each rule: the peak, and rows that this rank's experts get."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    module = example()
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("ep",))
    moe = module.MoE(DIM, EXPERTS, TOP_K, 128, mesh["ep"]).cuda().bfloat16()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.fill_(0.01)
    router = moe.router.forward
    rows: list[int] = []
    moe.experts.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    found: dict[str, list[Any]] = {}
    for rule in SHARES:
        ext.set_routing(rule, 1.0, 0, 1)
        forced = routed(rule).cuda()

        def forward(x: torch.Tensor, forced: torch.Tensor = forced) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = router(x)
            if not ext.is_dry():
                chosen.data.copy_(forced)  # without a new version: backward needs it
            return weights, chosen

        moe.router.forward = forward
        x = torch.ones(1, TOKENS, DIM, device="cuda", dtype=torch.bfloat16)
        ext.clear_recording()
        ext.record(True)
        moe(x).sum().backward()
        moe.zero_grad()
        ext.record(False)
        found[rule] = [peak(ext.recording()), rows.pop()]
    return found
