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

GRAPHED = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 256)
        parts = [[part for _ in range(4) for part in (nn.Linear(256, 256), nn.GELU())] for _ in range(3)]
        self.layers = nn.ModuleList(nn.Sequential(*part) for part in parts)
        self.head = nn.Linear(256, 512)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

how = sys.argv[1]
model, ids = Model().cuda(), torch.zeros(4, 128, dtype=torch.long, device="cuda")
if how == "callables":
    model = torch.cuda.make_graphed_callables(model, (ids,))
optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

def step():
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    if how == "item":
        print(loss.item())
    optimizer.step()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side if how != "callables" else torch.cuda.current_stream()):
    for _ in range(2):
        step()
torch.cuda.current_stream().wait_stream(side)
if how in ("whole", "item"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
for _ in range(100):
    graph.replay() if how == "whole" else step()
"""
"""A model. Its kernels are launched one by one (``eager``), forward and backward apart (``callables``), or a ``whole``
step at once; with ``item`` the capture fails. 512 tokens a step; the first two steps are eager.
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
assert (large @ large).sum().item() == 0.8125
assert torch.isfinite(large.sum()).item()
large.requires_grad_().sum().backward()
torch.optim.SGD([large], lr=1.0).step()
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

torch.cuda.set_device(0)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 4096, bias=False), nn.Linear(4096, 512, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


model = MLP().cuda()
model.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (8192, 4096, 4096):
    model(torch.randn(rows, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

QUANTISED = """
import bitsandbytes as bnb
import torch
from torch import nn

layers = []
for out, given in ((4096, 1024), (1024, 4096)):
    layer = bnb.nn.Linear4bit(given, out, bias=False, compute_dtype=torch.bfloat16, device="meta")
    weight = torch.empty(out, given, dtype=torch.bfloat16, device="cuda")
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to("cuda")
    del weight
    layers.append(layer)
head = nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
model = nn.Sequential(*layers, head)
optimizer = bnb.optim.PagedAdamW32bit(head.parameters())
for step in range(3):
    model(torch.ones(2, 256, 1024, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Two layers quantised one after the other, and a third one that is trained, with its state in managed memory."""

IN_BACKWARD = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)))
optimizers = {p: torch.optim.AdamW([p], fused=True) for p in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(100):
    print("step", step)
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
"""
"""Each parameter of 4 MiB is updated as soon as it has its gradient."""

LENGTHS = """
import torch
from torch import nn

model = nn.Sequential(nn.Embedding(1024, 512), nn.Linear(512, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(100):
    length = 2048 if step == {longest} else 256 * (1 + step % {lengths})
    model(torch.zeros(2, length, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Batches of several lengths, the longest in one step only."""

FROM_PRETRAINED = """
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
    vocab_size=1024, tie_word_embeddings=False,
).save_pretrained("model")
{checkpoint}
quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    "model", quantization_config=quantised, dtype=torch.bfloat16, device_map={{"": 0}}
)
print("held", torch.cuda.memory_stats()["requested_bytes.all.current"])
"""
"""A model of two layers, quantised as transformers does; where its weights come from is to be filled in."""
ON_THE_CPU = """
import torch
from torch import nn

model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(5):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
"""

ASSERTS = """
import torch
from torch import nn

model = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def check(value):
    assert 1 < value < 2


for step in range(5):
    loss = model(torch.ones(8, 1024, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    value = loss.item()
    print(f"loss {loss:.3f}")
    check(value)
"""

WITHOUT_TRITON = """
import sys

sys.modules["triton"] = None  # as if it were not installed
import torch
from torch import nn

model = nn.Linear(64, 64, device="cuda")
compiled = torch.compile(model)
try:
    compiled(torch.ones(8, 64, device="cuda"))
except Exception:
    print("fell back to eager", file=sys.stderr)
"""

FRAGMENTS = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(3000, 3000, device="cuda") for _ in range(40)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    model(torch.ones(500 + 700 * step, 3000, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Batches grow, so fixed segments of a step do not serve the next one."""

SPAWNS = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def main(rank, world_size):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64, device="cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
"""

BATCHED = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--checkpoint", action="store_true")
options = parser.parse_args()
model = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    held = torch.empty(options.batch * (4 if options.checkpoint else 9) * 2**30, dtype=torch.uint8, device="cuda")
    model(torch.ones(options.batch, 1024, device="cuda")).sum().backward()
    optimizer.step()
    del held
"""
"""9 GiB for each sequence of a batch, or 4 GiB: 8 or 19 fit an H100."""
