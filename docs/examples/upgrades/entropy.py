"""Fine-tune a Llama with random weights by TRL's SFTTrainer, on sequences of 8,192 tokens.

Made after https://github.com/huggingface/trl/pull/4013.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

TOKENS = 8192
words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
config = LlamaConfig(
    hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, intermediate_size=8192,
    vocab_size=128_256, max_position_embeddings=TOKENS, use_cache=False, attn_implementation="sdpa",
)  # fmt: skip
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config).bfloat16()
arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=1, max_length=TOKENS, bf16=True,
    gradient_checkpointing=True, optim="adamw_torch_fused", report_to="none", save_strategy="no",
    dataset_kwargs={"skip_prepare_dataset": True},
)  # fmt: skip
data = Dataset.from_dict({"input_ids": [[2] * TOKENS] * 8, "labels": [[2] * TOKENS] * 8})
SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
