"""What a rank on the fake device sees of the machine: nothing, and it allocates nothing for it."""

from typing import Any

import torch

from refshard.harness.load import watched_load
from tests.fakecuda.child import check


@check
def watched() -> dict[str, Any]:
    """How many loads were found, and the device memory that looking took."""
    device = torch.device("cuda", 0)
    with watched_load(device) as found:
        assert found == []
    return {
        "seen": len(found),
        "allocated": torch.cuda.memory_allocated(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }
