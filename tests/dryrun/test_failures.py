"""What common mistakes of a script say: the rule, the value and the remedy."""

import argparse
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refshard.dryrun.failures import message, place
from refshard.fakecuda.without_triton import Refused


def unknown_option() -> None:
    argparse.ArgumentParser().parse_args(["--batch-sise", "2"])


def missing_variable() -> None:
    os.environ["NO_SUCH_DATA_DIR"]


def missing_file() -> None:
    Path("no/such/data.bin").read_bytes()


def missing_package() -> None:
    import no_such_package.of_mine  # type: ignore[import-not-found]  # noqa: F401


def missing_module() -> None:
    runpy.run_module("no_such_module", run_name="__main__")


def host_memory() -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    )


def wrong_gpu() -> None:
    raise RuntimeError("CUDA error: invalid device ordinal 3; this process sees 2 GPUs")


def sizes_in_compiled_code() -> None:
    def call() -> None:
        raise RuntimeError("Eq(u48 + u49, 65536)")

    call()


def fails_without_a_word() -> None:
    raise AssertionError


def refused() -> None:
    raise Refused("it needs Triton; pip install triton")


SAYS = [
    (
        sizes_in_compiled_code,
        "RuntimeError: Eq(u48 + u49, 65536): compiled code reads a size that depends on values that a dry run does not "
        "compute. Leave the routing of experts out of torch.compile, or use --compile no",
    ),
    (unknown_option, "the script rejected its own arguments (exit status 2); its message is above"),
    (missing_variable, "KeyError: the environment variable 'NO_SUCH_DATA_DIR' is not set; set it as for a run on GPUs"),
    (
        missing_file,
        "FileNotFoundError: [Errno 2] No such file or directory: 'no/such/data.bin'; a dry run reads the script's own "
        f"files, relative to {Path.cwd()}",
    ),
    (
        missing_package,
        "ModuleNotFoundError: No module named 'no_such_package'; install it for this Python: "
        f"{sys.executable} -m pip install no_such_package",
    ),
    (
        missing_module,
        f"no module 'train' can be run from {Path.cwd()}; -m takes a module's name as Python imports it",
    ),
    (
        host_memory,
        "RuntimeError: this machine, not the GPU, ran out of memory: you tried to allocate 1 bytes. Tensors on the CPU "
        "are real in a dry run: make the model on the GPU or under torch.device('meta')",
    ),
    (
        wrong_gpu,
        "RuntimeError: CUDA error: invalid device ordinal 3; this process sees 2 GPUs; --cluster and --gpus set how "
        "many, and LOCAL_RANK says which is this rank's",
    ),
    (fails_without_a_word, "AssertionError: raise AssertionError"),
    (refused, "it needs Triton; pip install triton"),
]


@pytest.mark.parametrize(("script", "says"), SAYS)
def test_an_error_says_what_to_do(script: Callable[[], None], says: str) -> None:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        script()
    assert message(raised.value, ["train"]) == says


def test_the_place_of_an_error_is_in_the_script_where_the_library_raised_it() -> None:
    with pytest.raises(KeyError) as raised:
        missing_variable()
    line = missing_variable.__code__.co_firstlineno + 1
    assert place(raised.value).endswith(f"test_failures.py:{line} in missing_variable")
