"""Training scripts that tests run dry, as a user would write them."""

TRAIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(100):
    loss = model(torch.ones(512, 1024, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, loss.item())
"""
"""Four units of 1024 x 1024 in fp32; one host synchronisation a step, in its last line."""

FAILS = """
import torch

def shapes():
    return torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")

shapes()
"""

TOO_LARGE = """
import torch
held = [torch.empty(2**30, device="cuda") for _ in range(30)]
"""
"""4 GiB each."""

RECEIVES = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
told = ["a run's name" if dist.get_rank() == 0 else None]
dist.broadcast_object_list(told, src=0)
"""

ENDLESS = """
import torch
held = []
while True:
    held.append(torch.empty(2**46, device="cuda"))
"""

TOO_LARGE_IN_BACKWARD = """
import torch
from torch import nn
model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False, device="cuda") for _ in range(10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1):
    model(torch.ones(8, 2**15, device="cuda")).sum().backward()
    optimizer.step()
"""
"""Parameters of 40 GiB in fp32, and gradients of as much."""

READS = """
import torch
large = torch.ones(4096, 4096, device="cuda")
counts = torch.arange(8, device="cuda")
assert counts.sum().item() == 28
assert (large @ large).sum().item() == 1.0
assert torch.isfinite(large.sum()).item()
torch.optim.SGD([large.requires_grad_()], lr=1.0).step()
"""
"""Reads two values that were computed or follow from one, and one that was not."""

FORWARD = """
import torch
from torch import nn
model = nn.Linear(1024, 1024, bias=False, device="cuda")
with torch.no_grad():
    model(torch.ones(8, 1024, device="cuda"))
"""
"""No optimizer ever steps."""

ROUTED = """
import torch
from torch import nn


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(256, 8, bias=False)
        self.experts = nn.Parameter(torch.ones(8, 256, 256))

    def forward(self, x):
        counts = self.gate(x).argmax(-1).bincount(minlength=8)
        if SIZED:
            return x.new_ones(8, counts.max().item(), 256) @ self.experts
        return x @ self.experts[0]


model = MoE().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    model(torch.ones(8192, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
"""A buffer for each of 8 experts, as long as the most popular one needs, or no size that depends on a choice."""

TRANSFORMERS = """
import torch
import transformers

common = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=1024, num_experts_per_tok=4,
)
own = {
    "Qwen3Moe": dict(num_experts=16, moe_intermediate_size=128), "Mixtral": dict(num_local_experts=16),
    "GptOss": dict(num_local_experts=16),
}
config = getattr(transformers, "FAMILYConfig")(**common, **own["FAMILY"])
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = getattr(transformers, "FAMILYForCausalLM")._from_config(config, experts_implementation="EXPERTS")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(2):
    tokens = torch.randint(1024, (2, 1024), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
"""
"""Two layers of a mixture of experts, with experts as grouped products or in a loop over those that have tokens."""

COMPILED = """
import torch
from torch import nn

graphs = []


def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward


model = torch.compile(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda(), backend=backend)
model(torch.randn(64, 512, device="cuda")).sum().backward()
print("compiled graphs:", len(graphs))
"""
