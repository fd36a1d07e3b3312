"""``python huggingface_checkpoint.py SHAPE FOLDER``: a model as on Hugging Face's Hub, without its values.

Configuration, tokenizer, names, shapes and dtypes are right; the file of weights is a hole that takes no room on disk.
"""
# mypy: ignore-errors

import json
import struct
import sys
from pathlib import Path

import torch
from standins import write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
COMMON = {
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 128256, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHAPES = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "rope_parameters": ROPE,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "tie_word_embeddings": True, "rope_parameters": ROPE | {"factor": 32.0},
    },
}  # fmt: skip


def write(shape: str, folder: Path) -> None:
    """Write ``config.json``, the tokenizer's files and ``model.safetensors``, in bf16."""
    write_tokenizer(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, **SHAPES[shape]), dtype=torch.bfloat16)
    model.config.save_pretrained(folder)
    header, end = {}, 0
    for name, weight in model.named_parameters():
        begin, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
