"""Fine-tune a Llama of 1.2 billion parameters with TRL's SFTTrainer, sharded by FSDP2."""
# mypy: ignore-errors

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from trl import SFTConfig, SFTTrainer, TrlParser

CONFIG = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    use_cache=False,
)  # fmt: skip


def main():
    (arguments,) = TrlParser(SFTConfig).parse_args_and_config(["--config", sys.argv[1]])
    tokenizer = AutoTokenizer.from_pretrained("standins/tokenizer")
    corpus = load_dataset("json", data_files="standins/corpus/data.json", split="train")
    model = AutoModelForCausalLM.from_config(CONFIG)
    SFTTrainer(model=model, args=arguments, train_dataset=corpus, processing_class=tokenizer).train()


if __name__ == "__main__":
    main()
