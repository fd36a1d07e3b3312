"""Which attention kernel is chosen, case by case, as torch 2.13's ``sdp_utils.cpp`` has it."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.fakecuda.answers import ask

pytestmark = pytest.mark.processes

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3
V100, T4, A100, L4, H100, B200, RTX5090 = (
    {"major": major, "minor": minor} for major, minor in ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
)
LLAMA = [2, 32, 8192, 128]  # batch, heads, sequence, head dimension
GROUPED = [2, 8, 8192, 128]
CUDNN_FIRST = {"order": [3, 1, 2, 0, 4]}
ONLY_FUSED = {"math": False, "overrideable": False}


def shape(**changed: int) -> list[int]:
    """LLAMA, with some sizes changed."""
    names = ("batch", "heads", "sequence", "head_dim")
    return [changed.get(name, size) for name, size in zip(names, LLAMA)]


def call(
    query: list[int] = LLAMA,
    key: list[int] | None = None,
    value: list[int] | None = None,
    *,
    mask: list[int] | None = None,
    mask_requires_grad: bool = False,
    settings: dict[str, Any] | None = None,
    gpu: dict[str, Any] | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
    grad_enabled: bool = True,
    **of_tensors: Any,
) -> dict[str, Any]:
    """The arguments of ``choose_attention``; what is not given is as in ``query``, and as in training."""
    tensors = {"dtype": "bf16", "requires_grad": True, **of_tensors}
    key = query if key is None else key
    masked = (mask, {"dtype": tensors["dtype"], "requires_grad": mask_requires_grad})
    return {
        "query": (query, tensors),
        "key": (key, tensors),
        "value": (key if value is None else value, tensors),
        "mask": None if mask is None else masked,
        "dropout": dropout,
        "causal": causal,
        "grouped": grouped,
        "grad_enabled": grad_enabled,
        "settings": settings or {},
        "capability": H100 if gpu is None else gpu,
    }


CASES: dict[str, tuple[dict[str, Any], int | str]] = {
    "flash is first": (call(causal=True), FLASH),
    "flash on an A100": (call(causal=True, gpu=A100), FLASH),
    "flash on an RTX 5090": (call(gpu=RTX5090), FLASH),
    "cuDNN where it is first": (call(causal=True, settings=CUDNN_FIRST), CUDNN),
    "cuDNN on an A100": (call(settings=CUDNN_FIRST, gpu=A100), CUDNN),
    "no cuDNN": (call(settings=CUDNN_FIRST, gpu={**H100, "cudnn": False}), FLASH),
    "cuDNN disabled": (call(settings={**CUDNN_FIRST, "cudnn": False}), FLASH),
    "cuDNN is not deterministic": (call(settings={**CUDNN_FIRST, "deterministic": True}), FLASH),
    "flash disabled": (call(settings={"flash": False}), EFFICIENT),
    "only math": (call(settings={"flash": False, "efficient": False, "cudnn": False}), MATH),
    "math before cuDNN": (call(settings={"flash": False, "efficient": False}), MATH),
    # dtypes
    "fp16": (call(dtype="fp16"), FLASH),
    "fp32": (call(dtype="fp32"), EFFICIENT),
    "fp64": (call(dtype="fp64"), MATH),
    "fp8 without FlashAttention-3": (call(dtype="fp8e4m3"), MATH),
    "fp8 with FlashAttention-3": (call(dtype="fp8e4m3", settings={"flash3": True}), FLASH),
    "fp16 before Ampere": (call(dtype="fp16", gpu=T4), EFFICIENT),
    "fp16 on Volta": (call(dtype="fp16", gpu=V100), EFFICIENT),
    "bf16 before Ampere": (call(gpu=T4), MATH),
    # masks
    "a mask": (call(mask=[8192, 8192]), EFFICIENT),
    "a mask for cuDNN": (call(mask=[2, 1, 8192, 8192], settings=CUDNN_FIRST), CUDNN),
    "a mask that cuDNN cannot broadcast": (call(mask=[3, 1, 8192, 8192], settings=CUDNN_FIRST), EFFICIENT),
    "a mask that learns": (call(mask=[8192, 8192], mask_requires_grad=True, settings=CUDNN_FIRST), EFFICIENT),
    "causal, fewer queries than keys": (call(shape(sequence=64), LLAMA, causal=True), EFFICIENT),
    # head dimensions
    "head dimension 256": (call(shape(head_dim=256)), FLASH),
    "head dimension 264": (call(shape(head_dim=264)), EFFICIENT),
    "head dimension 100": (call(shape(head_dim=100), settings=CUDNN_FIRST), FLASH),
    "head dimension 268": (call(shape(head_dim=268)), MATH),
    "head dimension 256 for cuDNN": (call(shape(head_dim=256), settings=CUDNN_FIRST), CUDNN),
    "the same with cuDNN 9.9": (
        call(shape(head_dim=256), settings=CUDNN_FIRST, gpu={**H100, "cudnn_version": 90900}),
        FLASH,
    ),
    "the same on an A100": (call(shape(head_dim=256), settings=CUDNN_FIRST, gpu=A100), FLASH),
    "latent attention": (call(shape(head_dim=192), None, LLAMA), EFFICIENT),
    "latent attention, cuDNN, Hopper": (call(shape(head_dim=192), None, LLAMA, settings=CUDNN_FIRST), CUDNN),
    "latent attention, cuDNN, Blackwell": (
        call(shape(head_dim=192), None, LLAMA, settings=CUDNN_FIRST, gpu=B200),
        CUDNN,
    ),
    "head dimension 192 of all, Blackwell": (call(shape(head_dim=192), settings=CUDNN_FIRST, gpu=B200), FLASH),
    "training with 200 on an L4": (call(shape(head_dim=200), gpu=L4), EFFICIENT),
    "inference with 200 on an L4": (call(shape(head_dim=200), gpu=L4, grad_enabled=False), FLASH),
    "frozen with 200 on an L4": (call(shape(head_dim=200), gpu=L4, requires_grad=False), FLASH),
    "training with 192 on an L4": (call(shape(head_dim=192), gpu=L4), FLASH),
    "training with 240 on an L4": (call(shape(head_dim=240), gpu=L4), FLASH),
    "and dropout": (call(shape(head_dim=240), gpu=L4, dropout=0.1), EFFICIENT),
    "training with 200 on an RTX 5090": (call(shape(head_dim=200), gpu=RTX5090), EFFICIENT),
    # heads and batches
    "grouped queries": (call(LLAMA, GROUPED, grouped=True), FLASH),
    "grouped queries in fp32": (call(LLAMA, GROUPED, grouped=True, dtype="fp32"), MATH),
    "groups that were not announced": (call(LLAMA, GROUPED), MATH),
    "groups that do not divide": (call(LLAMA, shape(heads=12), grouped=True), MATH),
    "fewer values than keys": (call(LLAMA, GROUPED, shape(heads=4), grouped=True), MATH),
    "the same with cuDNN": (call(LLAMA, GROUPED, shape(heads=4), grouped=True, settings=CUDNN_FIRST), CUDNN),
    "batches that broadcast": (call(LLAMA, shape(batch=1)), MATH),
    "a large batch": (call(shape(batch=65536), settings=CUDNN_FIRST), FLASH),
    # layouts
    "three dimensions": (call([32, 8192, 128], strides=[8192 * 128, 128, 1]), MATH),
    "a transposed head": (call(strides=[32 * 8192 * 128, 8192 * 128, 1, 8192]), MATH),
    "an empty sequence": (call(shape(sequence=0)), MATH),
    "misaligned fp32": (call(dtype="fp32", storage_offset=1), MATH),
    "aligned fp32": (call(dtype="fp32", storage_offset=4), EFFICIENT),
    "misaligned fp32 on a T4": (call(dtype="fp32", storage_offset=1, gpu=T4), EFFICIENT),
    "one key": (call(LLAMA, shape(sequence=1), settings=CUDNN_FIRST), FLASH),
    "nested tensors": (call(nested=True), MATH),
    "on the host": (call(on_device=False), MATH),
    # dropout
    "the dropout": (call(dropout=0.125, settings=CUDNN_FIRST), CUDNN),
    "a dropout that cuDNN does not have": (call(dropout=0.1, settings=CUDNN_FIRST), FLASH),
    "dropout with cuDNN 9.12": (
        call(dropout=0.125, settings=CUDNN_FIRST, gpu={**H100, "cudnn_version": 91200}),
        FLASH,
    ),
    "dropout with one query": (call(shape(sequence=1), LLAMA, dropout=0.125, settings=CUDNN_FIRST), FLASH),
    # nothing left
    "all disabled": (call(settings={"math": False, "flash": False, "efficient": False, "cudnn": False}), -1),
    "none takes it": (call(dtype="fp64", settings=ONLY_FUSED), "No available kernel. Aborting execution."),
    "torch's last resort": (call(dtype="fp64", settings={"math": False}), "Invalid backend"),
}


@cache
def answers() -> dict[str, Any]:
    return dict(zip(CASES, ask([("choose_attention", arguments) for arguments, _ in CASES.values()])))


@pytest.mark.parametrize("case", CASES)
def test_chooses_as_torch_does(case: str) -> None:
    assert answers()[case] == CASES[case][1]


def test_prefers_cudnn_on_hopper_and_blackwell_from_a_version_on() -> None:
    """CUDA 12 wheels took it for chips of compute capability 9.0, 10.0 and 10.3 only."""
    cases: list[tuple[dict[str, Any], bool]] = [
        (H100, True),
        (B200, True),
        (A100, False),
        (RTX5090, False),
        ({**H100, "cudnn_version": 91500}, False),
        ({**H100, "cudnn_version": 91501}, True),
        ({**H100, "cudnn": False}, False),
        ({"major": 10, "minor": 1}, True),
        ({"major": 10, "minor": 1, "cuda_version": 12090}, False),
        ({"major": 10, "minor": 3, "cuda_version": 12090}, True),
    ]
    found = ask([("prefers_cudnn", {"capability": capability}) for capability, _ in cases])
    assert found == [expected for _, expected in cases]


def test_says_why_a_kernel_does_not_take_a_call() -> None:
    reasons = ask(
        [
            ("why_not", {"backend": FLASH, **call(mask=[8192, 8192])}),
            ("why_not", {"backend": EFFICIENT, **call(LLAMA, GROUPED, grouped=True)}),
            ("why_not", {"backend": CUDNN, **call(shape(head_dim=264))}),
            ("why_not", {"backend": CUDNN, **call()}),
        ]
    )
    assert reasons == [
        "flash attention takes no mask",
        "query, key and value must have the same heads",
        "head dimensions must be at most 256",
        None,
    ]


_DEVICE = """
import json
from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware
activate(load_hardware("h100-sxm-80gb"))
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

CUDNN, FLASH, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
found = {}
q = torch.empty(2, 8192, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
k = torch.empty(2, 8192, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

def choose(name):
    try:
        found[name] = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True)
    except RuntimeError as error:
        found[name] = str(error).splitlines()[0]
"""
_SETTINGS = """
choose("by default")
for name, backends in {
    "flash before cuDNN": [FLASH, CUDNN], "cuDNN before flash": [CUDNN, FLASH], "efficient": [EFFICIENT], "none": [],
}.items():
    with sdpa_kernel(backends, set_priority=True):
        choose(name)
with sdpa_kernel([FLASH, CUDNN]):
    choose("without priority")
with sdpa_kernel(SDPBackend.MATH):
    choose("math")
torch.use_deterministic_algorithms(True)
choose("deterministic")
torch.use_deterministic_algorithms(False)
with torch.no_grad():
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
found["result"] = list(out.shape)
"""
_FIRST_CALL = """
with sdpa_kernel([FLASH, CUDNN], set_priority=True):
    choose("first")
    choose("second")
choose("afterwards")
"""


def on_device(script: str, **environment: str) -> dict[str, Any]:
    """What a script finds on fake H100s, in a process of its own."""
    command = [sys.executable, "-c", f"{_DEVICE}\n{script}\nprint(json.dumps(found))"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_follows_what_the_program_sets() -> None:
    assert on_device(_SETTINGS) == {
        "by default": CUDNN,
        "flash before cuDNN": FLASH,
        "cuDNN before flash": CUDNN,
        "efficient": "No available kernel. Aborting execution.",
        "none": "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both "
        "the math kernel and the fused kernels.",
        "without priority": CUDNN,
        "math": MATH,
        "deterministic": FLASH,
        "result": [2, 32, 8192, 128],
    }


def test_first_call_overrides_a_priority_set_before_it() -> None:
    """The first choice of a process puts cuDNN first, whatever order the program has set until then."""
    assert on_device(_FIRST_CALL) == {"first": CUDNN, "second": CUDNN, "afterwards": FLASH}


def test_environment_variable_keeps_flash_first() -> None:
    found = on_device('choose("by default")', TORCH_CUDNN_SDPA_DEPRIORITIZED="1")
    assert found == {"by default": FLASH}
