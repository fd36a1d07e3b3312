"""The engine within the transforms of ``torch.func`` (``jvp``, ``vmap``, ``grad``) that a model is called in."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Method = TypeVar("Method", bound=Callable[..., Any])


def in_transform() -> bool:
    """Whether a transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms(method: Method) -> Method:
    """Run a method outside of transforms: they would take operators on the engine's own memory for the model's."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not in_transform():
            return method(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return method(*args, **kwargs)

    return cast(Method, run)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What transforms have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
