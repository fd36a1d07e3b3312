"""``python litgpt_checkpoint.py TOKENIZER FOLDER``: a checkpoint folder of litgpt's Llama 3.1 8B, without values."""
# mypy: ignore-errors

import shutil
import sys
from pathlib import Path

import hollow
import torch
from litgpt import GPT, Config
from litgpt.utils import save_config


def write(tokenizer: Path, folder: Path) -> None:
    """Write the tokenizer's files, ``model_config.yaml`` and ``lit_model.pth`` in bf16."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    (folder / "tokenizer.model").unlink()  # SentencePiece's, to litgpt
    config = Config.from_name("Llama-3.1-8B")
    save_config(config, folder)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in GPT(config).state_dict().items()}
    hollow.save(shapes, folder / "lit_model.pth")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
