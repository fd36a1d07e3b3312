"""What a rank on the fake device sees of the machine: nothing, and it allocates nothing for it."""

from typing import Any

import torch

from refshard.measure.environment import describe_gpus
from refshard.measure.load import watched_gpus, watched_load
from tests.fakecuda.child import check


@check
def watched() -> dict[str, Any]:
    """How many loads and GPUs were found, and the device memory that looking took."""
    device = torch.device("cuda", 0)
    with watched_load(device) as found, watched_gpus(device) as gpus:
        assert found == []
    return {
        "seen": len(found),
        "gpus": len(gpus),
        "allocated": torch.cuda.memory_allocated(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


@check
def described() -> dict[str, Any]:
    """What the environment says of the GPUs."""
    return describe_gpus()
