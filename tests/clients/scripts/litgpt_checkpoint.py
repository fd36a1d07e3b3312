"""``python litgpt_checkpoint.py TOKENIZER FOLDER``: a checkpoint folder of litgpt's Llama 3.1 8B, without its values.

Names, shapes and dtypes are right; the file has a hole where the weights would be, so it takes no room on disk.
"""
# mypy: ignore-errors

import shutil
import sys
from pathlib import Path

import torch
from litgpt import GPT, Config
from litgpt.utils import save_config
from torch._subclasses.fake_tensor import FakeTensorMode


def write(tokenizer: Path, folder: Path) -> None:
    """Write the tokenizer's files, ``model_config.yaml`` and ``lit_model.pth`` in bf16."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    (folder / "tokenizer.model").unlink()  # SentencePiece's, to litgpt
    config = Config.from_name("Llama-3.1-8B")
    save_config(config, folder)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in GPT(config).state_dict().items()}
    with FakeTensorMode():
        weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(weights, folder / "lit_model.pth")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
