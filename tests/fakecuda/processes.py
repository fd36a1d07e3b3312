"""Processes that have the fake CUDA device, which must be there before torch."""

import pickle
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware


def on_fake_device(*, target: Callable[..., object], args: tuple[Any, ...], daemon: bool) -> SpawnProcess:
    """A process that will call ``target(*args)`` on a node of fake H100s, in host compute.

    It is a fresh interpreter: this one, and those that are forked from it, have torch already.
    """
    # Pickled twice, so that the target's module, which imports torch, is imported after the device is there.
    return get_context("spawn").Process(target=_main, args=(pickle.dumps((target, args)),), daemon=daemon)


def _main(pickled: bytes) -> None:
    activate(load_hardware("h100-sxm-80gb"), mode="host")
    target, args = pickle.loads(pickled)
    target(*args)
