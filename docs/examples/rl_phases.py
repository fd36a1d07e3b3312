"""Train a small language model by reinforcement learning over torch's FSDP2: generate, score, train, evaluate, save.

A plain script, with nothing of refshard in it. ``record_function`` names its phases, as for a profiler.
On eight GPUs: torchrun --nproc-per-node 8 rl_phases.py
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

VOCABULARY, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32000, 2048, 16, 4, 128, 5632
Cache = list[tuple[torch.Tensor, ...]]
"""Keys and values of each layer: (sequences, heads, tokens, head dimension)."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor, cache: tuple[torch.Tensor, ...] | None = None, start: int = 0) -> torch.Tensor:
        batch, length = x.shape[:2]
        h = self.attention_norm(x)
        q, k, v = (layer(h).view(batch, length, -1, HEAD_DIM).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if cache is not None:
            for cached, new in zip(cache, (k, v)):
                cached[:, :, start : start + length] = new
            k, v = (cached[:, :, : start + length] for cached in cache)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Without positions, for brevity. ``outputs`` is the vocabulary's size, or 1 for a reward."""

    def __init__(self, layers: int, outputs: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, outputs, bias=False)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None, start: int = 0) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if cache is None else cache[number], start)
        return self.head(self.norm(x if cache is None else x[:, -1:]))


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


@torch.no_grad()
def generate(policy: nn.Module, prompts: torch.Tensor, new_tokens: int, cache: Cache) -> torch.Tensor:
    tokens, start = prompts, 0
    for _ in range(new_tokens):
        logits = policy(tokens[:, start:], cache, start)
        start = tokens.shape[1]
        tokens = torch.cat((tokens, torch.multinomial(logits[:, -1].float().softmax(-1), 1)), dim=1)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=128, help="Sequences of a GPU in each round.")
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "rl_phases")
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("meta"):
        policy = Llama(options.layers)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in policy.layers:
        fully_shard(layer, mp_policy=mixed)
    fully_shard(policy, mp_policy=mixed).to_empty(device="cuda")
    with torch.device("cuda"):
        reference = Llama(options.layers).bfloat16().eval().requires_grad_(False)
        reward = Llama(options.layers, outputs=1).bfloat16().eval().requires_grad_(False)
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    length = options.prompt_tokens + options.new_tokens
    shape = (2, options.prompts, KV_HEADS, length, HEAD_DIM)  # keys and values
    cache: Cache = []

    for number in range(1, options.rounds + 1):
        prompts = torch.randint(VOCABULARY, (options.prompts, options.prompt_tokens), device="cuda")
        policy.eval()
        with record_function("generate"):
            if not cache:  # made once, and used again in each round
                for _ in range(options.layers):
                    cache.append(torch.empty(shape, dtype=torch.bfloat16, device="cuda").unbind())
            tokens = generate(policy, prompts, options.new_tokens, cache)

        batches = tokens.split(options.microbatch)
        with record_function("score"), torch.no_grad():
            old = [log_probabilities(policy, batch) for batch in batches]
            known = [log_probabilities(reference, batch) for batch in batches]
            rewards = torch.cat([reward(batch)[:, -1].float() for batch in batches])
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).split(options.microbatch)

        policy.train()
        with record_function("train"):
            for batch, before, expected, advantage in zip(batches, old, known, advantages):
                new = log_probabilities(policy, batch)
                ratio = (new - before).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = (0.1 * (new - expected) ** 2 - gain)[:, options.prompt_tokens - 1 :].mean() / len(batches)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        if number % options.evaluate_every == 0:
            with record_function("evaluate"), torch.no_grad():
                held_out = torch.randint(VOCABULARY, (4 * options.microbatch, length), device="cuda")
                policy.eval()
                loss = -log_probabilities(policy, held_out).mean()
            with record_function("save"):
                dcp.save(get_model_state_dict(policy), checkpoint_id=options.checkpoint)
            if dist.get_rank() == 0:
                print(f"round {number}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
