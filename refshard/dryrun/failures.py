"""What a script's error tells its user: what went wrong, where, and what to do about it."""

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from refshard.errors import first_line
from refshard.fakecuda.torch_c import is_internal, short
from refshard.fakecuda.without_triton import MISSING, Refused

_FROM_OTHERS = frozenset({"_tensor_to_object", "broadcast_object_list", "recv_object_list", "scatter_object_list"})
"""Functions of torch.distributed that unpickle what another rank sent."""


def of_script(error: BaseException) -> TracebackType | None:
    """The traceback from the script's own first line on, or the whole of it if it never got there."""
    rest = error.__traceback__
    while rest is not None and is_internal(rest.tb_frame.f_code.co_filename):
        rest = rest.tb_next
    return rest if rest is not None or isinstance(error, SyntaxError) else error.__traceback__


def before_capture_failed(error: BaseException) -> BaseException:
    """What made the capture of a CUDA graph invalid, where its end only says that something did."""
    cause = error.__context__
    return cause if cause is not None and "previous error during capture" in str(error) else error


def message(error: BaseException, command: Sequence[str]) -> str:
    """What went wrong, and what to do about it where that is known."""
    frames = traceback.extract_tb(error.__traceback__)
    name, said = type(error).__name__, first_line(error) if str(error).strip() else frames[-1].line or "no message"
    functions = [frame.name for frame in frames]
    if isinstance(error, SystemExit):
        if error.code == 2 and "parse_args" in functions:
            return "the script rejected its own arguments (exit status 2); its message is above"
        return f"the script ended with exit status {error.code if isinstance(error.code, int) else f'1: {error.code}'}"
    if isinstance(error, Refused):
        return said
    if is_missing_module(error):
        return f"no module '{command[0]}' can be run from {Path.cwd()}; -m takes a module's name as Python imports it"
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        return f"{name}: {MISSING}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"{name}: {said}; install it for this Python: {sys.executable} -m pip install {package}"
    if isinstance(error, OSError) and any(_loads_weights(frame) for frame in frames):
        return (
            f"{name}: {said.rstrip('.')}. A dry run needs no weights: make the model from its configuration, "
            "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER)) with config.json in FOLDER, or load "
            "a sparse checkpoint (docs/how-to/hugging-face.md)"
        )
    if isinstance(error, FileNotFoundError):
        return f"{name}: {said}; a dry run reads the script's own files, relative to {Path.cwd()}"
    if isinstance(error, KeyError) and _in_environment(error):
        return f"{name}: the environment variable {said} is not set; set it as for a run on GPUs"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in said:
        return (
            f"{name}: this machine, not the GPU, ran out of memory: {said.rpartition('memory: ')[2]}. Tensors on the "
            "CPU are real in a dry run: make the model on the GPU or under torch.device('meta')"
        )
    if "invalid device ordinal" in said:
        return f"{name}: {said}; --cluster and --gpus set how many, and LOCAL_RANK says which is this rank's"
    if not _FROM_OTHERS.isdisjoint(functions):
        return (
            f"{name}: the script unpickles an object that another rank would have sent, but a dry run runs one rank "
            "only; run the rank that sends it (--rank, usually 0)"
        )
    if re.search(r"\bu\d+\b", said) and frames[-1].name == "call":  # a size that inductor's wrapper has read
        return (
            f"{name}: {said}: compiled code reads a size that depends on values that a dry run does not compute. Leave "
            "the routing of experts out of torch.compile, or use --compile no"
        )
    return f"{name}: {said}"


def is_missing_module(error: BaseException) -> bool:
    """Whether Python found no module of the name after ``-m``: the script's code never ran."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ImportError) and last.name == "_get_module_details"


def _loads_weights(frame: traceback.FrameSummary) -> bool:
    """Whether a function of transformers that loads a model was called, and not one that loads a tokenizer."""
    return frame.name == "from_pretrained" and Path(frame.filename).name in ("auto_factory.py", "modeling_utils.py")


def _in_environment(error: BaseException) -> bool:
    """Whether ``os.environ[...]`` raised it."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return last.filename in ("<frozen os>", os.__file__)


def place(error: BaseException) -> str:
    """The innermost line of the traceback that is neither torch's nor this project's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_internal(f.filename)]
    return f"{short(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
