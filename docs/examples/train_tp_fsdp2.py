"""Train a Llama 3.1 405B with tensor parallelism within nodes and FSDP2 between them: a plain script.

On 64 nodes of eight GPUs: torchrun --nnodes 64 --nproc-per-node 8 train_tp_fsdp2.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_fsdp2 import Llama


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Split every matrix over the ranks of a node; each of them works on the same tokens."""
    whole = Replicate()
    ends = {"embedding": RowwiseParallel(input_layouts=whole), "head": ColwiseParallel(output_layouts=whole)}
    parallelize_module(model, mesh, ends)
    into, back = ("q", "k", "v", "gate", "up"), ("o", "down")
    for layer in model.layers:
        layer.heads //= mesh.size()
        layer.kv_heads //= mesh.size()
        plan = {**{name: ColwiseParallel() for name in into}, **{name: RowwiseParallel() for name in back}}
        parallelize_module(layer, mesh, plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    node = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cuda", (dist.get_world_size() // node, node), mesh_dim_names=("fsdp", "tp"))
    with torch.device("meta"):
        model = Llama(options.layers, dim=16384, heads=128, kv_heads=8, hidden=53248, vocab=128256)
    model.checkpointed = True
    split(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-5, fused=True)

    for _ in range(options.steps):
        batch = torch.randint(128256, (options.batch, options.seq_len + 1), device="cuda")
        logits = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
