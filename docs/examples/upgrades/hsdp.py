"""HSDP: bf16 parameters sharded over 8 GPUs of a node and replicated over nodes, gradients reduced in fp32.

Made after https://github.com/pytorch/pytorch/pull/179443.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A feed-forward layer of 2 x 4096 x 8192 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum with its input."""
        return x + self.down(nn.functional.silu(self.up(x)))


class Model(nn.Module):
    """Layers that are recomputed in backward."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's output."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size() // 8, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
torch.set_default_dtype(torch.bfloat16)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
layers = nn.ModuleList()
with torch.device("cuda"):
    for _ in range(32):
        layers.append(fully_shard(Block(), mesh=mesh, mp_policy=policy))
model = fully_shard(Model(layers), mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.ones(1, 2048, 4096, device="cuda")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
