"""The part of ``ya_fsdp``'s interface that its adapter uses, over torch's FSDP2: for where that is missing.

Like the real one it keeps the last two units gathered after forward. It pads each parameter's first dimension rather
than the unit, so bytes agree where every such dimension is divisible; and it reduces nothing that is frozen.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as YaFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as _fully_shard
from torch.distributed.tensor import DTensor as RaggedShardDTensor

__all__ = ["MixedPrecisionPolicy", "RaggedShardDTensor", "YaFSDPModule", "fully_shard"]


def fully_shard(module: nn.Module | list[nn.Module], **options: Any) -> None:
    """As torch's; called on the root, it looks at the units inside."""
    inner = [] if isinstance(module, list) else [m for m in module.modules() if isinstance(m, YaFSDPModule)]
    _fully_shard(module, **options)
    kept = list(dict.fromkeys(one._get_fsdp_state() for one in inner))[-2:]
    for one in inner:
        if one._get_fsdp_state() in kept:
            one.set_reshard_after_forward(False, recurse=False)
