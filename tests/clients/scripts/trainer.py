"""Train a Llama of 1.2 billion parameters from scratch with transformers' Trainer, sharded by FSDP2.

``trainer.py FILE [--option value ...]``: TrainingArguments from a YAML file; options override it.
"""
# mypy: ignore-errors

import sys
from pathlib import Path

import yaml
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)  # fmt: skip

SEQUENCE = 4096
CONFIG = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    use_cache=False,
)  # fmt: skip


def blocks(texts, tokenizer):
    """Token ids in blocks of ``SEQUENCE``."""
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    return {"input_ids": [ids[at : at + SEQUENCE] for at in range(0, len(ids) - SEQUENCE + 1, SEQUENCE)]}


def main():
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(**yaml.safe_load(Path(sys.argv[1]).read_text()))
    (arguments,) = parser.parse_args_into_dataclasses(sys.argv[2:])
    tokenizer = AutoTokenizer.from_pretrained("standins/tokenizer")
    corpus = load_dataset("json", data_files="standins/corpus/data.json", split="train")
    data = corpus.map(lambda batch: blocks(batch["text"], tokenizer), batched=True, remove_columns=["text"])
    model = AutoModelForCausalLM.from_config(CONFIG)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator).train()


if __name__ == "__main__":
    main()
