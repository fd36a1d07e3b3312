"""Factories of modules that have no dimensions for closed forms, and of one that has: real widths, few blocks."""

from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

Made = tuple[nn.Module, Any]


def _of_tokens(module: nn.Module, vocab: int) -> Made:
    def batch(sequences: int, seq_len: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        ids = torch.randint(vocab, (sequences, seq_len), generator=generator, device="cpu")
        return {"input_ids": ids, "labels": ids}

    return module, batch


def vit() -> Made:
    """ViT-L/16 for images of 224 x 224; a token is an image."""
    config = ViTConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, intermediate_size=4096)
    config.num_labels = 1000

    def batch(sequences: int, seq_len: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(sequences, 3, 224, 224, generator=generator, device="cpu"),
            "labels": torch.randint(1000, (sequences,), generator=generator, device="cpu"),
        }

    return ViTForImageClassification(config), batch


def bert() -> Made:
    """BERT-large."""
    config = BertConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, intermediate_size=4096)
    return _of_tokens(BertForMaskedLM(config), config.vocab_size)


def neox() -> Made:
    """Pythia 6.9B's blocks: attention and feed-forward side by side, a quarter of each head rotated."""
    config = GPTNeoXConfig(
        vocab_size=50432, hidden_size=4096, num_hidden_layers=4, num_attention_heads=32, intermediate_size=16384,
        max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return _of_tokens(GPTNeoXForCausalLM(config), config.vocab_size)


def llama() -> Made:
    """Llama 3.2 1B, four of its blocks."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, head_dim=64, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=131072,
    )  # fmt: skip
    return _of_tokens(LlamaForCausalLM(config), config.vocab_size)
