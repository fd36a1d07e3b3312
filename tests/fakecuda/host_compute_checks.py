"""What a fake GPU computes against the CPU, for :mod:`tests.fakecuda.test_host_compute`."""

import itertools
import sys
import unittest
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.fakecuda.child import check
from tests.fakecuda.host_compute_cases import CASES

SAMPLES = 2
"""Of each operator, as many of torch's own samples."""
LEFT_OUT = (
    "empty", "rand", "new_empty", "normal", "sparse", "to_sparse", "ops.aten", "_scaled_mm", "tensor_split",
    "as_strided", "jiterator", "signal.", "linspace", "logspace", "arange", "zeros", "ones", "full", "eye", "special.",
    "polygamma", "stft", "istft", "_refs", "linalg.lstsq", "triu_indices", "tril_indices", "max_pool3d", "max_unpool",
    "histogram", "fractional", "svd", "pca", "lobpcg", "unravel", "geometric", "log_normal", "cauchy", "exponential",
    "bernoulli", "multinomial", "uniform",
)  # fmt: skip
"""Not computed from tensors, not dense, or rare in training."""


@check
def cases() -> dict[str, str]:
    """Of each case, what differs; nothing where the same bytes come out or the same to rounding."""
    found = {}
    for name, function in CASES.items():
        try:
            torch.manual_seed(0)
            wanted = list(function("cpu"))
            torch.manual_seed(0)
            found[name] = _difference(wanted, list(function("cuda")))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _difference(wanted: Any, got: Any, *, strides: bool = False) -> str:
    for place, (want, have) in enumerate(zip(tree_leaves(wanted), tree_leaves(got), strict=True)):
        if not isinstance(want, torch.Tensor):
            continue
        if (want.dtype, want.shape) != (have.dtype, have.shape) or (strides and want.stride() != have.stride()):
            return f"result {place}: {want.dtype}{list(want.shape)} is {have.dtype}{list(have.shape)}"
        try:
            torch.testing.assert_close(have.detach().cpu(), want.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            return f"result {place}: {error}"
    return ""


def _operators() -> list[Any]:
    expecttest = ModuleType("expecttest")  # torch's samples import it and use nothing of it
    expecttest.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        one for one in op_db
        if torch.float32 in one.supported_dtypes("cpu") and not any(part in one.name for part in LEFT_OUT)
    ]  # fmt: skip


@check
def operators() -> dict[str, Any]:
    """Torch's own samples of its operators: results, their strides, gradients, in place, and into an ``out``."""
    compared, wrong = 0, {}
    for operator in _operators():
        for sample in itertools.islice(operator.sample_inputs("cpu", torch.float32, requires_grad=True), SAMPLES):
            on_cuda = sample.transform(_moved)
            for way in (_forward, _in_place, _into_out):
                try:
                    wanted = way(operator, sample)
                except Exception:
                    break  # not on the CPU either
                compared += wanted is not None
                try:
                    difference = _difference(wanted, way(operator, on_cuda), strides=way is not _in_place)
                except Exception as error:
                    difference = f"{type(error).__name__}: {error}"
                if difference:
                    wrong[f"{operator.name} {way.__name__.strip('_')}"] = difference[:300]
    return {"compared": compared, "wrong": wrong}


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        moved = value.detach().clone(memory_format=torch.preserve_format).to("cuda")
        return moved.requires_grad_(value.requires_grad)
    return torch.device("cuda") if isinstance(value, torch.device) else value


def _leaves(sample: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(one, torch.Tensor)]


def _forward(operator: Any, sample: Any) -> Iterable[Any]:
    torch.manual_seed(0)
    out = operator(sample.input, *sample.args, **sample.kwargs)
    first = next((one for one in tree_leaves(out) if isinstance(one, torch.Tensor) and one.requires_grad), None)
    if first is None or first.is_complex():
        return [out]
    leaves = [one for one in _leaves(sample) if one.requires_grad]
    return [out, torch.autograd.grad(first.sum() + (first * first.detach()).sum(), leaves, allow_unused=True)]


def _in_place(operator: Any, sample: Any) -> torch.Tensor | None:
    function: Callable[..., torch.Tensor] | None = operator.get_inplace()
    if function is None or not isinstance(sample.input, torch.Tensor):
        return None
    torch.manual_seed(0)
    with torch.no_grad():
        return function(sample.input.detach().clone(), *sample.args, **sample.kwargs)


def _into_out(operator: Any, sample: Any) -> torch.Tensor | None:
    if not operator.supports_out:
        return None
    plain = sample.transform(lambda one: one.detach() if isinstance(one, torch.Tensor) else one)
    with torch.no_grad():
        torch.manual_seed(0)
        like = operator(plain.input, *plain.args, **plain.kwargs)
        if not isinstance(like, torch.Tensor):
            return None
        out = torch.empty(0, dtype=like.dtype, device=like.device)
        torch.manual_seed(0)
        return operator(plain.input, *plain.args, **plain.kwargs, out=out)  # type: ignore[no-any-return]


@check
def dropout() -> dict[str, Any]:
    """A mask is drawn anew each time, and again where the state is set back, as checkpointing does."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(3)
    x = torch.ones(64, device="cuda", requires_grad=True)
    host = torch.get_rng_state()
    first, second = (torch.nn.functional.dropout(x, 0.5) for _ in range(2))
    state = torch.cuda.get_rng_state()
    third = torch.nn.functional.dropout(x, 0.5)
    torch.cuda.set_rng_state(state)
    again = torch.nn.functional.dropout(x, 0.5)
    out = checkpoint(lambda y: torch.nn.functional.dropout(y, 0.5), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    return {
        "first and second differ": bool((first != second).any()), "third comes again": bool((third == again).all()),
        "recomputed mask": bool((out == gradient).all()), "kept": bool(0 < first.count_nonzero() < 64),
        "host's generator untouched": bool((host == torch.get_rng_state()).all()),
    }  # fmt: skip


@check
def compiled() -> dict[str, Any]:
    """``aot_eager`` gives the right values; what Triton would run is refused."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).cuda()
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    wanted = module(x)
    got = torch.compile(module, backend="aot_eager")(x)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (wanted, got)]
    refused = ""
    try:
        torch.compile(module)(x)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return {
        "values": bool((wanted == got).all()),
        "gradients": bool((gradients[0] == gradients[1]).all()),
        "inductor": refused,
    }


@check
def refused() -> dict[str, str]:
    """Operators that no CPU kernel computes name themselves and the remedy."""
    tries: dict[str, Callable[[], object]] = {
        "lstm": lambda: torch.nn.LSTM(4, 4).cuda()(torch.randn(2, 3, 4, device="cuda")),
        "flash": lambda: torch.ops.aten._scaled_dot_product_flash_attention(*torch.randn(3, 1, 2, 4, 8, device="cuda")),
        "sparse": lambda: torch.eye(3, device="cuda").to_sparse(),
    }
    found = {}
    for name, function in tries.items():
        try:
            function()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
