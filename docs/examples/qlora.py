"""Fine-tune a Llama 3.1 8B with QLoRA: peft and bitsandbytes, in a plain script with nothing of refshard in it.

Without --weights the model is made from its configuration, with random values: enough to see what fits and how fast it
is. With --weights it is loaded: python qlora.py --weights meta-llama/Llama-3.1-8B
"""

import argparse

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
)  # fmt: skip
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)


def load(weights: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        weights, quantization_config=NF4, dtype=torch.bfloat16, device_map={"": 0}
    )


def build(layers: int) -> nn.Module:
    """The model with random weights: each linear layer of the blocks is quantised as soon as it is made."""
    LLAMA_8B.num_hidden_layers = layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LLAMA_8B, dtype=torch.bfloat16)
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, nn.Linear):
            quantised = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, device="meta"
            )
            values = torch.randn(linear.weight.shape, dtype=torch.bfloat16, device="cuda") * 0.02
            quantised.weight = bnb.nn.Params4bit(
                values, requires_grad=False, quant_type="nf4", compress_statistics=True
            ).to("cuda")
            model.model.set_submodule(name, quantised)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            values = torch.randn(parameter.shape, dtype=torch.bfloat16, device="cuda") * 0.02
            setattr(model.get_submodule(owner), last, nn.Parameter(values))
    with torch.device("cuda"):
        model.model.rotary_emb = type(model.model.rotary_emb)(LLAMA_8B)
    model.is_loaded_in_4bit = True
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", help="A model's name on the Hugging Face Hub, or a folder.")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    model = load(options.weights) if options.weights else build(options.layers)
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(model)  # norms in fp32, checkpointing, gradients for inputs
    adapters = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", lora_dropout=0.05)
    model = get_peft_model(model, adapters)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = bnb.optim.PagedAdamW8bit(trained, lr=2e-4)

    for step in range(options.steps):
        tokens = torch.randint(model.config.vocab_size, (options.batch, options.seq_len), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
