"""Pretrain GPT-NeoX of transformers without a cache, by torch's scaled dot-product attention.

Made after https://github.com/huggingface/transformers/issues/41856.
"""

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

config = GPTNeoXConfig(
    hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, intermediate_size=8192,
    max_position_embeddings=8192, use_cache=False, attn_implementation="sdpa",
)  # fmt: skip
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config).bfloat16()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    ids = torch.zeros(1, 8192, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
