"""``python llama3_checkpoint.py FILE``: a checkpoint of Llama 3 8B as Meta publishes it, without its values."""
# mypy: ignore-errors

import sys
from pathlib import Path

import hollow

DIM, LAYERS, HIDDEN, KEYS, VOCABULARY = 4096, 32, 14336, 1024, 128256
LAYER = {
    "attention.wq": (DIM, DIM), "attention.wk": (KEYS, DIM), "attention.wv": (KEYS, DIM), "attention.wo": (DIM, DIM),
    "feed_forward.w1": (HIDDEN, DIM), "feed_forward.w2": (DIM, HIDDEN), "feed_forward.w3": (HIDDEN, DIM),
    "attention_norm": (DIM,), "ffn_norm": (DIM,),
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """The shape of each weight by its name."""
    whole = {"tok_embeddings": (VOCABULARY, DIM), "norm": (DIM,), "output": (VOCABULARY, DIM)}
    layers = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in LAYER.items()}
    return {f"{name}.weight": shape for name, shape in (whole | layers).items()}


if __name__ == "__main__":
    hollow.save(shapes(), Path(sys.argv[1]))
