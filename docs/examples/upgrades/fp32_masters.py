"""FSDP2 by accelerate with mixed precision: a model that is loaded in bf16, to be trained with fp32 masters.

Made after https://github.com/huggingface/accelerate/issues/3979.
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
    vocab_size=32_000, use_cache=False, attn_implementation="sdpa",
)  # fmt: skip
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(3):
    ids = torch.zeros(1, 4096, dtype=torch.long, device="cuda")
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
