"""``python token_files.py FOLDER``: a ``train.bin`` and a ``val.bin`` of GPT-2's token ids, as for nanoGPT."""

import sys
from pathlib import Path

import numpy as np


def write(path: Path, tokens: int) -> None:
    """Write random ids as unsigned 16-bit integers, the same each time."""
    np.random.default_rng(0).integers(50257, size=tokens, dtype=np.uint16).tofile(path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.bin", 1_000_000)
    write(folder / "val.bin", 100_000)
