"""``python standins.py FOLDER``: a tokenizer and a corpus for a machine without a network.

The tokenizer has one token for each byte, in the files that Hugging Face's and Llama's loaders read. What memory holds
depends on the model's vocabulary, sequence length and batch, not on the tokens.
"""

import base64
import json
import random
import sys
from pathlib import Path

LLAMA3_TOKENS = 128000
"""In tokenizer.model, since there are loaders that take the model's vocabulary from it."""
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


def byte_symbols() -> list[str]:
    """A printable symbol for each byte, in the order of ByteLevel's alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``tokenizer.model``."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {symbol: number for number, symbol in enumerate((*byte_symbols(), *SPECIAL))}
    special = [
        {"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for token in SPECIAL
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "fuse_unk": False, "byte_fallback": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[1], "model_max_length": 1 << 20,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"\xff" + number.to_bytes(3, "big") for number in range(LLAMA3_TOKENS - len(pieces))]  # never in a text
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
    (folder / "tokenizer.model").write_text("".join(lines))


WORDS = ["shard", "gather", "reduce", "overlap", "memory", "step", "token", "rank", "stream", "kernel"]


def write_corpus(folder: Path, documents: int = 64, words: int = 2000) -> None:
    """Write ``data.json``: a line of JSON with a ``text`` for each document, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(0)
    lines = (json.dumps({"text": " ".join(chosen.choices(WORDS, k=words))}) for _ in range(documents))
    (folder / "data.json").write_text("\n".join(lines) + "\n")


def write_instructions(path: Path, samples: int = 500, words: int = 100) -> None:
    """Write a list of samples with Alpaca's fields, of up to so many words, the same each time."""
    chosen = random.Random(0)
    some = [
        {"instruction": "Say it again.", "input": "", "output": " ".join(chosen.choices(WORDS, k=1 + n % words))}
        for n in range(samples)
    ]
    path.write_text(json.dumps(some))


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]) / "tokenizer")
    write_corpus(Path(sys.argv[1]) / "corpus")
    write_instructions(Path(sys.argv[1]) / "instructions.json")
