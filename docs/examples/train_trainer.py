"""Train a Llama 3.2 1B with transformers' Trainer and FSDP2, on random tokens.

Every field of TrainingArguments is an option: ``train_trainer.py --per_device_train_batch_size 4``.
"""

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments

CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    use_cache=False,
)


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 4,096 tokens, each its own labels."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(CONFIG.vocab_size, (4096,))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train as ``TrainingArguments`` say."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="outputs",
        max_steps=10,
        per_device_train_batch_size=2,
        bf16=True,
        fsdp=True,
        fsdp_config={"reshard_after_forward": True, "activation_checkpointing": True},
        report_to="none",
        save_strategy="no",
    )
    (arguments,) = parser.parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_config(CONFIG)
    Trainer(model=model, args=arguments, train_dataset=RandomTokens()).train()


if __name__ == "__main__":
    main()
