"""Fine-tune a Llama with transformers and PEFT as the published runs did: whole, LoRA, DoRA, QLoRA, norms.

On one GPU, or sharded by FSDP1 as Accelerate does. The model is made from its dimensions, not loaded. Token ids are
zeros.
"""

import argparse
import contextlib
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "dim", "heads", "kv-heads", "hidden", "vocab", "head-dim"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--experts", type=int, default=0, help="Of each block, as in Mixtral of transformers 4.")
    parser.add_argument("--active", type=int, default=2, help="Experts of a token.")
    parser.add_argument("--tied", action="store_true", help="The embedding is the output layer's too.")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dp-shard", type=int, default=1)
    parser.add_argument("--attention", choices=list(KERNELS), default="flash")
    parser.add_argument("--masked", action="store_true", help="Samples differ in length: attention gets a mask.")
    parser.add_argument("--checkpoint", choices=["none", "full"], default="none")
    parser.add_argument("--reentrant", action="store_true", help="Checkpoint by torch's reentrant implementation.")
    parser.add_argument("--loss", choices=["whole", "copied"], default="whole", help="copied: of shifted fp32 logits.")
    parser.add_argument("--keep-logits", action="store_true", help="A step's output lives until the next one's.")
    parser.add_argument("--autocast", action="store_true", help="To bf16, as the Trainer does with bf16=True.")
    parser.add_argument("--optimizer", choices=["foreach", "fused"], default="foreach")
    parser.add_argument("--parameter-dtype", type=partial(getattr, torch), default=torch.bfloat16)
    parser.add_argument("--adapter", choices=["none", "lora", "dora", "norms"], default="none")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--target", action="append", default=[], help="A module that the adapter is put on.")
    parser.add_argument("--nf4", action="store_true", help="Weights in bitsandbytes' NF4, quantised twice.")
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> Any:
    config = LlamaConfig(
        hidden_size=options.dim, intermediate_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.kv_heads, head_dim=options.head_dim,
        vocab_size=options.vocab, max_position_embeddings=max(options.seq_len, 4096),
        tie_word_embeddings=options.tied, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip

    def make() -> Any:
        model = AutoModelForCausalLM.from_config(config, dtype=options.parameter_dtype)
        for layer in model.model.layers if options.experts else ():
            layer.mlp = Mixture(options).to(options.parameter_dtype)
        return model

    if options.dp_shard > 1:
        with torch.device("meta"):
            model = make()
    elif options.nf4:
        model = quantised(make)
    else:
        # transformers takes the memory of all weights in one piece before it loads them.
        with torch.device("meta"):
            numbers = sum(parameter.numel() for parameter in make().parameters())
        room = torch.empty(numbers, dtype=options.parameter_dtype, device="cuda")
        del room
        with torch.device("cuda"):
            model = make()
    if options.loss == "copied":
        model.loss_function = copied_loss
    if options.checkpoint == "full":
        model.gradient_checkpointing_enable({"use_reentrant": options.reentrant})
        if options.adapter != "none":
            model.enable_input_require_grads()
    adapted = with_adapter(model, options) if options.adapter != "none" else model
    return sharded(model, adapted) if options.dp_shard > 1 else adapted


def sharded(model: Any, adapted: nn.Module) -> nn.Module:
    """Each block is a unit, and so is each trained matrix of LoRA; the rest is the root's."""
    with torch.device("cuda"):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    block, lora = type(model.model.layers[0]), adapted is not model

    def unit(module: nn.Module, recurse: bool, **_: Any) -> bool:
        trained = lora and not list(module.children()) and any(p.requires_grad for p in module.parameters())
        return recurse or isinstance(module, block) or trained

    return FullyShardedDataParallel(
        adapted, auto_wrap_policy=unit, use_orig_params=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        param_init_fn=materialise, device_id=torch.cuda.current_device(),
    )  # fmt: skip


@torch.no_grad()
def materialise(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            made = nn.Parameter(torch.empty_like(parameter, device="cuda"), requires_grad=parameter.requires_grad)
            setattr(module, name, made)


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Experts one after the other, each on the tokens that the router gives it."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.active = options.active
        self.router = nn.Linear(options.dim, options.experts, bias=False)
        self.experts = nn.ModuleList(Expert(options.dim, options.hidden) for _ in range(options.experts))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights = torch.softmax(self.router(x), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.active, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for place, expert in enumerate(self.experts):
            rank, tokens = torch.where(mask[place])
            given = expert(x[None, tokens].reshape(-1, x.shape[-1])) * weights[tokens, rank, None]
            out.index_add_(0, tokens, given.to(x.dtype))
        return out.reshape(shape)


def quantised(make: Any) -> nn.Module:
    """Linear layers but the last in NF4, one after the other, as they are loaded; the rest in bf16, norms in fp32."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    with torch.device("meta"):
        model: nn.Module = make()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        wide = torch.empty(module.weight.shape, dtype=module.weight.dtype)
        replaced = Linear4bit(
            module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16,
            compress_statistics=True, quant_type="nf4", device="meta",
        )  # fmt: skip
        replaced.weight = Params4bit(wide, requires_grad=False, compress_statistics=True, quant_type="nf4").to("cuda")
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, replaced)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                dtype = torch.float32 if "norm" in type(module).__name__.lower() else parameter.dtype
                empty = torch.empty(parameter.shape, dtype=dtype, device="cuda")
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
    inner: Any = model
    inner.is_loaded_in_4bit = True
    with torch.device("cuda"):
        inner.model.rotary_emb = type(inner.model.rotary_emb)(inner.config)
    return model


def with_adapter(model: Any, options: argparse.Namespace) -> Any:
    from peft import LNTuningConfig, LoraConfig, get_peft_model

    if options.adapter == "norms":
        return get_peft_model(model, LNTuningConfig(task_type="CAUSAL_LM", target_modules=options.target))
    config = LoraConfig(
        task_type="CAUSAL_LM", r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout,
        target_modules=options.target, use_dora=options.adapter == "dora",
    )  # fmt: skip
    return get_peft_model(model, config)


def copied_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """As transformers had it until 2025, within the model's forward."""
    logits = logits.float()
    shifted, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels.view(-1))


def output_of(model: Any, tokens: Tensor, mask: Tensor | None, options: argparse.Namespace) -> Any:
    context = torch.autocast("cuda", torch.bfloat16) if options.autocast else contextlib.nullcontext()
    with context:
        out = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    if options.autocast:
        out.logits = out.logits.float()
    return out


def main() -> None:
    options = read_options()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if options.dp_shard > 1:
        dist.init_process_group("nccl")
    model = make_model(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = {"foreach": options.optimizer == "foreach", "fused": options.optimizer == "fused"}
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1, **chosen)
    model.train()
    torch.cuda.reset_peak_memory_stats()
    mask = None
    if options.masked:
        mask = torch.ones(options.batch, options.seq_len, dtype=torch.int64)
        mask[1:, -1] = 0
    for step in range(1, options.steps + 1):
        tokens = torch.zeros(options.batch, options.seq_len, dtype=torch.int64).to("cuda")
        optimizer.zero_grad()
        with sdpa_kernel(KERNELS[options.attention], set_priority=True):
            out = output_of(model, tokens, mask if mask is None else mask.to("cuda"), options)
            loss = out.loss
            if not options.keep_logits:
                del out
            loss.backward()
        if not options.keep_logits:
            # The Trainer drops the graph too, which would hold the embedding's output until the next step's.
            loss = loss.detach()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        stats = torch.cuda.memory_stats()
        peaks = (stats[f"{kind}_bytes.all.peak"] / 2**30 for kind in ("reserved", "allocated"))
        print(
            f"step {step}: loss {loss.item():.3f}, memory {next(peaks):.2f} GiB, {next(peaks):.2f} allocated",
            flush=True,
        )


if __name__ == "__main__":
    main()
