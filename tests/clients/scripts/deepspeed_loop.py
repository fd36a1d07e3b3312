"""Train a Llama of 1.2 billion parameters under DeepSpeed's engine."""
# mypy: ignore-errors

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SEQUENCE = 4096
CONFIG = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    use_cache=False,
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed("nccl")
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=config["zero_optimization"]["stage"] == 3):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    for _ in range(10):
        ids = torch.randint(
            CONFIG.vocab_size, (engine.train_micro_batch_size_per_gpu(), SEQUENCE), device=engine.device
        )
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
