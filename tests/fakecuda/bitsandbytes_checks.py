"""bitsandbytes in a dry run, for :mod:`tests.fakecuda.test_bitsandbytes`."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from torch import nn

from refshard.dryrun.recording import Flag, Kind, collect
from refshard.fakecuda.bitsandbytes import managed_bytes
from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check

bnb: Any = bitsandbytes  # it exports nothing by name
functional = bnb.functional
OUT, IN = 4096, 1024
ext = sys.modules[NAME]
ops = torch.ops.bitsandbytes


def requested() -> int:
    gc.collect()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def launches(run: Callable[[], Any]) -> list[list[Any]]:
    """Name, signature, bytes read and written of what bitsandbytes launches."""
    ext.clear_recording()
    ext.record(True)
    run()
    ext.record(False)
    made = collect(ext, 0, 1)
    rows = [row for row in range(len(made)) if made.kinds[row] == Kind.LAUNCH]
    names = {row: made.name_table[made.names[row]].partition("bitsandbytes::")[2] for row in rows}
    return [
        [name, made.signature_table[made.signatures[row]], int(made.reads[row]), int(made.writes[row])]
        for row, name in names.items()
        if name
    ]


def layer(*, double: bool) -> nn.Linear:
    made = bnb.nn.Linear4bit(
        IN, OUT, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=double
    )
    quantised: nn.Linear = made.to(torch.bfloat16).to("cuda")
    return quantised


@check
def one_layer() -> dict[str, Any]:
    """What a quantised layer holds, and most that quantising it took."""
    layer(double=True)  # which leaves the table of scales' codes, of 1 KiB, for all layers to come
    found = {}
    for double in (False, True):
        before = requested()
        torch.cuda.reset_peak_memory_stats()
        made = layer(double=double)
        peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        found["double" if double else "single"] = {"held": requested() - before, "peak": peak - before}
        del made
    return found


@check
def optimizer_state() -> dict[str, Any]:
    found = {}
    for name in ("AdamW8bit", "AdamW32bit", "Lion8bit", "SGD8bit", "AdEMAMix8bit", "PagedAdamW8bit", "PagedAdamW32bit"):
        weight = nn.Parameter(torch.empty(OUT, IN, device="cuda", dtype=torch.bfloat16))
        weight.grad = torch.empty_like(weight)
        optimizer = getattr(bnb.optim, name)([weight], lr=1e-3, **({"momentum": 0.9} if "SGD" in name else {}))
        before, paged = requested(), managed_bytes()
        optimizer.step()
        found[name] = [requested() - before, managed_bytes() - paged]
    return found


@check
def optimizer_launches() -> list[list[Any]]:
    weight = nn.Parameter(torch.empty(OUT, IN, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.empty_like(weight)
    return launches(bnb.optim.AdamW8bit([weight]).step) + launches(bnb.optim.PagedLion32bit([weight]).step)


@check
def weight_launches() -> list[list[Any]]:
    weight = torch.empty(OUT, IN, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
        functional.dequantize_4bit(packed, state)

    return launches(run)


@check
def products() -> dict[str, list[str]]:
    """What a quantised layer launches: for few tokens one kernel, for many the weight is dequantised first."""
    made = layer(double=True)

    def names(tokens: int) -> list[str]:
        x = torch.empty(tokens, IN, device="cuda", dtype=torch.bfloat16)
        return [f"{name} {signature}" for name, signature, _, _ in launches(lambda: made(x))]

    return {"few": names(4), "many": names(2048)}


@check
def results() -> dict[str, Any]:
    """Shapes and dtypes of each operator's results on the fake device and on the CPU, by bitsandbytes' own kernels."""
    found = {}
    for device in ("cuda", "cpu"):
        weight = torch.ones(OUT, IN, device=device, dtype=torch.bfloat16)
        given = torch.ones(4, IN, device=device, dtype=torch.bfloat16)
        eights, others = (torch.ones(n, IN, device=device, dtype=torch.int8) for n in (4, OUT))
        code = functional.create_dynamic_map().to(device)
        packed, absmax = ops.quantize_4bit(weight, 64, "nf4", torch.uint8)
        stored, _ = ops.quantize_4bit(weight, 64, "fp4", torch.bfloat16)
        bytes_, scales = ops.quantize_blockwise(weight, code, 256)
        products = ops.int8_linear_matmul(eights, others)
        rows, columns = torch.ones(4, device=device), torch.ones(OUT, device=device)
        made = {
            "quantize_4bit": [packed, absmax, stored],
            "dequantize_4bit": [ops.dequantize_4bit(packed, absmax, 64, "nf4", weight.shape, torch.bfloat16)],
            "quantize_blockwise": [bytes_, scales],
            "dequantize_blockwise": [ops.dequantize_blockwise(bytes_, scales, code, 256, torch.float32)],
            "gemm_4bit": [ops.gemm_4bit(given, packed, weight.shape, absmax, 64, "nf4")],
            "gemv_4bit": [ops.gemv_4bit(given[:1], packed, weight.shape, absmax, code[:16], 64)],
            "int8_linear_matmul": [products],
            "int8_mm_dequant": [ops.int8_mm_dequant(products, rows, columns)],
            "int8_scaled_mm": [ops.int8_scaled_mm(eights, others, rows, columns, dtype=torch.bfloat16)],
            "int8_vectorwise_quant": list(ops.int8_vectorwise_quant(given.half()))[:2],
            "int8_vectorwise_dequant": [ops.int8_vectorwise_dequant(eights, rows)],
        }
        found[device] = {name: [[str(t.dtype), *t.shape] for t in tensors] for name, tensors in made.items()}
    return found


@check
def values() -> dict[str, bool]:
    """Whether the host is told that a value it reads was not computed."""
    ext.clear_recording()
    ext.record(True)
    weight = torch.ones(8, 64, device="cuda", dtype=torch.bfloat16)
    _, absmax = ops.quantize_4bit(weight, 64, "nf4", torch.uint8)
    absmax[0].item()
    weight[0, 0].item()
    ext.record(False)
    made = collect(ext, 0, 1)
    reads = made.flags[made.kinds == Kind.SYNCHRONISE] & Flag.VALUE_UNKNOWN
    return dict(zip(("scale", "weight"), (reads > 0).tolist()))


@check
def not_supported() -> str:
    a = torch.ones(32, 32, device="cuda", dtype=torch.int8)
    try:
        functional.igemm(a, a)
    except NotImplementedError as error:
        return str(error)
    return ""


@check
def training() -> dict[str, Any]:
    """A step of a quantised layer with an adapter, in 8 bits too."""
    found = {}
    eight = bnb.nn.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False, threshold=6.0).to("cuda")
    for name, base in (("4 bits", layer(double=True)), ("8 bits", eight)):
        down = nn.Linear(IN, 8, bias=False, device="cuda", dtype=torch.bfloat16)
        up = nn.Linear(8, OUT, bias=False, device="cuda", dtype=torch.bfloat16)
        x = torch.ones(2048, IN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (base(x) + up(down(x))).sum().backward()
        assert x.grad is not None
        assert down.weight.grad is not None
        found[name] = [list(x.grad.shape), list(down.weight.grad.shape)]
    return found
