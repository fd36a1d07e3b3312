"""Fine-tune a Llama 3.2 on one GPU as torchtune's single-device recipes do, on packed samples.

Token ids are zeros; a sample ends every so many tokens (``--sample``).
"""

import argparse
import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from model import Norm
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

POSITIONS = 131_072
CHUNKS = 8
IGNORED = -100


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "dim", "heads", "kv-heads", "hidden", "vocab", "head-dim"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sample", type=int, default=256, help="Tokens of a sample in a packed sequence.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--compile", action="append", default=[], choices=["attention", "blocks", "loss"])
    parser.add_argument("--checkpoint", choices=["none", "full"], default="none")
    parser.add_argument("--offload", action="store_true", help="Keep what backward needs in host memory.")
    parser.add_argument("--loss", choices=["whole", "chunked"], default="chunked")
    parser.add_argument("--optimizer", choices=["foreach", "fused", "8bit"], default="foreach")
    parser.add_argument("--in-backward", action="store_true", help="Step each parameter as its gradient is there.")
    parser.add_argument("--rank", type=int, default=0, help="Of LoRA; 0 trains all parameters.")
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--target", action="append", default=[], help="A layer of each block with LoRA: q, k, v, ...")
    parser.add_argument("--nf4", action="store_true", help="Weights of linear layers in torchao's NF4.")
    return parser.parse_args()


class LoRA(nn.Module):
    """A frozen linear layer, in bf16 or NF4, and with a rank its two trained matrices."""

    def __init__(self, width: int, out: int, rank: int, options: argparse.Namespace) -> None:
        super().__init__()
        weight: Tensor = nn.Linear(width, out, bias=False).weight
        if options.nf4:
            from torchao.quantization import to_nf4

            weight = to_nf4(weight)
        self.nf4, self.scale = options.nf4, options.alpha / rank if rank else 0.0
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Linear(width, rank, bias=False) if rank else None
        self.b = nn.Linear(rank, out, bias=False) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        if self.nf4:
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

            out = linear_nf4(input=x, weight=self.weight)
        else:
            out = F.linear(x, self.weight)
        return out if self.a is None or self.b is None else out + self.scale * self.b(self.a(x))


def linear(name: str, width: int, out: int, options: argparse.Namespace) -> nn.Module:
    if not options.rank:
        return nn.Linear(width, out, bias=False)
    adapted = name in options.target
    if not adapted and not options.nf4:
        return nn.Linear(width, out, bias=False).requires_grad_(False)
    return LoRA(width, out, options.rank if adapted else 0, options)


class Positions(nn.Module):
    """Cosine and sine of every position, made once for all blocks."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        frequencies = 1.0 / 500_000.0 ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(POSITIONS).float(), frequencies.float()).float()
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turn = self.table[positions].view(-1, pairs.size(1), 1, pairs.size(3), 2)
        out = torch.stack([
            pairs[..., 0] * turn[..., 0] - pairs[..., 1] * turn[..., 1],
            pairs[..., 1] * turn[..., 0] + pairs[..., 0] * turn[..., 1],
        ], -1)  # fmt: skip
        return out.flatten(3).type_as(x)


@cache
def compiled_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable(recursive=False)
def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return compiled_attention()(q, k, v, block_mask=mask)


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace, positions: Positions) -> None:
        super().__init__()
        self.options, self.positions = options, positions
        dim, width = options.dim, options.head_dim
        make = partial(linear, options=options)
        self.q, self.o = make("q", dim, options.heads * width), make("o", options.heads * width, dim)
        self.k, self.v = (make(name, dim, options.kv_heads * width) for name in "kv")
        self.gate, self.up = (make(name, dim, options.hidden) for name in ("gate", "up"))
        self.down = make("down", options.hidden, dim)
        self.attention_norm, self.feed_forward_norm = (Norm(dim, 1e-5, late=False) for _ in range(2))

    def forward(self, x: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        h = self.attend(self.attention_norm(x), mask, positions) + x
        normal = self.feed_forward_norm(h)
        return h + self.down(F.silu(self.gate(normal)) * self.up(normal))

    def attend(self, x: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, kv_heads, width = self.options.heads, self.options.kv_heads, self.options.head_dim
        q = self.positions(self.q(x).view(batch, length, heads, width), positions).transpose(1, 2)
        k, v = (layer(x).view(batch, length, -1, width) for layer in (self.k, self.v))
        k, v = self.positions(k, positions).transpose(1, 2), v.transpose(1, 2)
        wide = (batch, kv_heads, heads // kv_heads, -1, width)
        k, v = (each.unsqueeze(2).expand(wide).flatten(1, 2) for each in (k, v))
        return self.o(attend(q, k, v, mask).transpose(1, 2).contiguous().view(batch, length, -1))


class Head(nn.Module):
    """The output layer, of the embedding's weight."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        positions = Positions(options.head_dim)
        self.layers = nn.ModuleList(Block(options, positions) for _ in range(options.layers))
        self.embedding = nn.Embedding(options.vocab, options.dim)
        self.norm, self.head = Norm(options.dim, 1e-5, late=False), Head()

    def forward(self, tokens: Tensor, mask: BlockMask, positions: Tensor) -> Tensor | list[Tensor]:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, mask, positions)
        h = self.norm(h)
        return self.chunks(h) if self.options.loss == "chunked" else self.head(h, self.embedding.weight).float()

    @torch.compiler.disable
    def chunks(self, h: Tensor) -> list[Tensor]:
        return [self.head(chunk, self.embedding.weight) for chunk in h.chunk(CHUNKS, dim=1)]


def make_model(options: argparse.Namespace) -> Model:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Model(options)
    torch.set_default_dtype(torch.float32)
    if options.rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".a." in name or ".b." in name)
    for place, layer in enumerate(model.layers):
        if "blocks" in options.compile:
            layer.compile(backend="inductor")
        if options.checkpoint == "full":
            model.layers[place] = checkpoint_wrapper(layer)
    return model


class Offloaded(saved_tensors_hooks):
    """Copy what autograd saves to pinned host memory on a stream of its own, and back when backward asks for it.

    The last five stay on the GPU while their copy may run. A tensor that came back is freed when the next node asks.
    """

    def __init__(self) -> None:
        self.compute, self.copies = torch.cuda.default_stream(), torch.cuda.Stream()
        self.saved: dict[int, tuple[Tensor, bool]] = {}
        self.leaving: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self.back: dict[int, Tensor] = {}
        self.node: Any = None
        self.count = 0
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        if tensor.numel() * tensor.element_size() < 1024 or isinstance(tensor, nn.Parameter | nn.Buffer):
            self.saved[self.count] = tensor, False
            return self.count
        for place in [place for place in self.leaving if place <= self.count - 5]:
            self.compute.wait_event(self.leaving.pop(place)[1])
        self.copies.wait_stream(self.compute)
        with torch.cuda.stream(self.copies):
            host = torch.empty_like(tensor, pin_memory=True, device="cpu")
            host.copy_(tensor, non_blocking=True)
        self.saved[self.count] = host, True
        self.leaving[self.count] = tensor, self.copies.record_event()
        return self.count

    def unpack(self, place: int) -> Tensor:
        tensor, offloaded = self.saved.pop(place)
        if not offloaded:
            return tensor
        node = torch._C._current_autograd_node()
        if node != self.node:
            self.node = node
            self.copies.wait_stream(self.compute)
            self.back.clear()
        if place in self.leaving:
            kept = self.leaving[place][0]
            self.leaving.clear()
            return kept
        self.leaving.clear()
        with torch.cuda.stream(self.copies):
            self.back[place] = tensor.to("cuda", non_blocking=True)
        self.compute.wait_stream(self.copies)
        return self.back[place]


def on_the_gpu() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def keep_head(model: Model) -> None:
    """What the output layer saves is not offloaded."""
    hooks: list[saved_tensors_hooks] = []

    def enter(*_: Any) -> None:
        hooks.append(on_the_gpu())
        hooks[-1].__enter__()

    def leave(*_: Any) -> None:
        hooks.pop().__exit__()

    model.head.register_forward_pre_hook(enter)
    model.head.register_forward_hook(leave, always_call=True)


def entropy_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def loss_of(logits: Tensor | list[Tensor], labels: Tensor, entropy: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if isinstance(logits, Tensor):
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1), ignore_index=IGNORED)
    total: Any = 0.0
    pieces = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    del logits
    for chunk, wanted in zip(pieces, labels.chunk(CHUNKS, dim=1)):
        total += entropy(chunk, wanted.reshape(-1))
    return total / (labels != IGNORED).sum()


def make_optimizer(parameters: Any, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, lr=2e-5)
    return torch.optim.AdamW(parameters, lr=2e-5, fused=options.optimizer == "fused" or None)


def step_in_backward(model: nn.Module, options: argparse.Namespace) -> None:
    for parameter in model.parameters():
        own = make_optimizer([parameter], options)

        def step(_: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def batch_of(options: argparse.Namespace) -> tuple[Tensor, BlockMask, Tensor]:
    shape = options.batch, options.seq_len
    places = torch.arange(options.seq_len, device="cuda").expand(shape)
    samples = places // options.sample

    def seen(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (samples[b, query] == samples[b, key])

    mask = create_block_mask(seen, options.batch, None, options.seq_len, options.seq_len, device="cuda")
    return torch.zeros(shape, dtype=torch.int64).to("cuda"), mask, places % options.sample


def main() -> None:
    options = read_options()
    torch.cuda.set_device(0)
    model = make_model(options).train()
    entropy = torch.compile(entropy_of) if "loss" in options.compile else entropy_of
    optimizer = None
    if options.in_backward:
        step_in_backward(model, options)
    else:
        optimizer = make_optimizer(model.parameters(), options)
    context: Any = contextlib.nullcontext()
    if options.offload:
        context = Offloaded()
        keep_head(model)
    ignored = torch.full((options.batch, 1), IGNORED, device="cuda")
    for step in range(1, options.steps + 1):
        tokens, mask, positions = batch_of(options)
        with context:
            logits = model(tokens, mask, positions)
        labels = torch.hstack((tokens[..., 1:], ignored))
        counted = (tokens != IGNORED).sum()
        loss = loss_of(logits, labels, entropy) * counted
        del logits
        loss.backward()
        if optimizer is not None:
            scale = 1 / counted
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30
        print(f"step {step}: loss {loss.item():.3f}, active {peak:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
