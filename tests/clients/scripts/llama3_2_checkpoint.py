"""``python llama3_2_checkpoint.py FOLDER``: a checkpoint of Llama 3.2 3B as on Hugging Face, without its values."""
# mypy: ignore-errors

import json
import sys
from pathlib import Path

import hollow

DIM, LAYERS, HIDDEN, KEYS, VOCABULARY = 3072, 28, 8192, 1024, 128256
CONFIG = {"hidden_size": DIM, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": VOCABULARY}
LAYER = {
    "self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (KEYS, DIM), "self_attn.v_proj": (KEYS, DIM),
    "self_attn.o_proj": (DIM, DIM), "mlp.gate_proj": (HIDDEN, DIM), "mlp.up_proj": (HIDDEN, DIM),
    "mlp.down_proj": (DIM, HIDDEN), "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,),
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """The shape of each weight by its name; the output layer is the embedding's."""
    layers = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in LAYER.items()}
    whole = {"embed_tokens": (VOCABULARY, DIM), "norm": (DIM,)}
    return {f"model.{name}.weight": shape for name, shape in (whole | layers).items()}


def write(folder: Path) -> None:
    """Write ``config.json`` and ``pytorch_model.bin`` in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hollow.save(shapes(), folder / "pytorch_model.bin")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
