"""Python runs this at the start of every process on whose PYTHONPATH this folder is: it plants faults.

``PLANTED`` is "STRATEGY RANK PLACE DEED, ...": the rank with that number of a case of that strategy does the deed when
it gets to the place; at ``dashboard`` the harness itself does it, whatever strategy and rank. It uses what Python and
torch offer for the purpose: audit events and global module hooks.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEP = 2
"""The step, from 0, in which forward and backward meet their fault."""

HANGING = "hangs"
"""The file in the case's folder that tells that a rank hangs; in the run's, that the harness does."""

IS_RANK = bool({"refshard.measure.worker", "tests.measure.fake_gpu_worker"} & set(sys.orig_argv))


def kill() -> None:
    """End as by the kernel's hand."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Live on, and do nothing more."""
    (Path(sys.orig_argv[-2 if IS_RANK else -1]) / HANGING).touch()
    time.sleep(3600)


def fail() -> None:
    """Raise what no other rank raises."""
    raise ZeroDivisionError("planted")


def in_result(rank: str, deed: Callable[[], None]) -> None:
    """Do it where the result is written, and has not got its name yet."""

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith(f"rank{rank}.json"):
            deed()

    sys.addaudithook(on_event)


def in_dashboard(deed: Callable[[], None]) -> None:
    """Do it as the page is begun, before any of it is drawn."""

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and Path(str(arguments[0])).name.startswith(".dashboard.html."):
            deed()

    sys.addaudithook(on_event)


def in_model(place: str, deed: Callable[[], None]) -> None:
    """Do it in forward or backward of the step :data:`STEP`; torch is there when the case is read."""
    hooked = False

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal hooked
        if event == "open" and not hooked and str(arguments[0]).endswith("case.json"):
            hooked = True
            hook(place, deed)

    sys.addaudithook(on_event)


def hook(place: str, deed: Callable[[], None]) -> None:
    """Let the whole model's forward come upon the deed, or lay it in wait for backward."""
    import torch
    from torch import nn

    seen = 0

    def before(module: nn.Module, _arguments: object) -> None:
        nonlocal seen
        if type(module).__name__.endswith("Llama"):
            seen += 1
            if seen == STEP + 1 and place == "forward":
                deed()

    def after(module: nn.Module, _arguments: object, output: torch.Tensor) -> None:
        if type(module).__name__.endswith("Llama") and seen == STEP + 1 and place == "backward":
            output.register_hook(lambda _: deed())

    nn.modules.module.register_module_forward_pre_hook(before)
    nn.modules.module.register_module_forward_hook(after)


for planted in filter(None, os.environ.get("PLANTED", "").split(",")):
    strategy, rank, place, deed = planted.split()
    done = {"kill": kill, "hang": hang, "fail": fail}[deed]
    if place == "dashboard":
        in_dashboard(done)
    elif IS_RANK and os.environ.get("RANK") == rank and Path(sys.orig_argv[-2]).name.startswith(f"{strategy}-"):
        if place == "result":
            in_result(rank, done)
        else:
            in_model(place, done)
