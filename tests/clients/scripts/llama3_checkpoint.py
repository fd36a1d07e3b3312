"""``python llama3_checkpoint.py FILE``: a checkpoint of Llama 3 8B as Meta publishes it, without its values.

Names, shapes and dtypes are right; the file has a hole where the weights would be, so it takes no room on disk.
"""

import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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


def write(path: Path) -> None:
    """Write the checkpoint in bf16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FakeTensorMode():
        weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(weights, path)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
