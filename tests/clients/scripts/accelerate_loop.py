"""Train a Llama of 1.2 billion parameters in a loop of one's own; Accelerate's configuration says how it is sharded."""
# mypy: ignore-errors

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

SEQUENCE, BATCH = 4096, 2
CONFIG = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    use_cache=False,
)  # fmt: skip


def main():
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(CONFIG.vocab_size, (1024, SEQUENCE))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
