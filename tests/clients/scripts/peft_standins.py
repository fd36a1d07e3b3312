"""``python peft_standins.py``: what PEFT's comparison of methods on MetaMathQA reads from Hugging Face's Hub.

A model without values and three data sets, in folders with the names that it asks for. Tokens are bytes. The longest
sequence is a guess, as PEFT publishes none.
"""
# mypy: ignore-errors

import json
import random
from pathlib import Path

from huggingface_checkpoint import write

LONGEST = 650
"""Tokens of a question with its answer. PEFT's result for LoRA of rank 32 needs about as many; its limit is 768."""
AROUND = len("Question:  Think step by step.\nAnswer:The answer is: 7")
GSM8K = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.json
  - split: test
    path: test.json
---
"""


def text(chosen: random.Random, letters: int) -> str:
    """Words of this many letters in all."""
    return " ".join(chosen.choices(["shard", "gather", "reduce", "overlap"], k=letters))[:letters]


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a line of JSON for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_all() -> None:
    """Write everything into the current folder."""
    chosen = random.Random(0)
    write("llama-3.2-3b", Path("meta-llama/Llama-3.2-3B"))
    lengths = [LONGEST, *(chosen.randint(150, LONGEST) for _ in range(1999))]
    queries = [text(chosen, length - AROUND) for length in lengths]
    made = {"type": "made", "response": "The answer is: 7"}
    rows = [{**made, "query": query, "original_question": query} for query in queries]
    write_lines(Path("meta-math/MetaMathQA/train.json"), rows)
    for split in ("train", "test"):
        answered = [{"question": query, "answer": "#### 7"} for query in queries[:100]]
        write_lines(Path(f"openai/gsm8k/{split}.json"), answered)
    Path("openai/gsm8k/README.md").write_text(GSM8K)
    write_lines(Path("HuggingFaceFW/finewiki/train.json"), [{"text": text(chosen, 2000)} for _ in range(100)])
    if not (link := Path("experiments")).exists():
        link.symlink_to("method_comparison/MetaMathQA/experiments")


if __name__ == "__main__":
    write_all()
