"""Compiled code and Triton kernels in a dry run, for :mod:`tests.fakecuda.test_compiled`.

Each check returns the launches of one function, as dictionaries of what the recording has.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from refshard.dryrun.compiled import compilation
from refshard.dryrun.observe import Observer
from refshard.dryrun.recording import Kind
from refshard.fakecuda import inductor
from refshard.fakecuda.build import NAME
from refshard.fakecuda.without_triton import Refused
from tests.fakecuda.child import check

ROWS, COLUMNS = 4096, 1024
EXT: Any = sys.modules[NAME]
OBSERVER = Observer(EXT, 100)
OBSERVER.install()


def rows(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, COLUMNS)), device="cuda", **options)


def launches(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Of the second call: the first compiles."""
    run()
    EXT.clear_recording()
    EXT.record(True)
    run()
    EXT.record(False)
    r = EXT.recording()
    return [
        {"name": r["name_table"][r["names"][i]], "signature": r["signature_table"][r["signatures"][i]],
         "module": r["module_table"][r["modules"][i]],
         **{key: int(r[f"{key}s"][i]) for key in ("read", "write", "size", "phase", "stream")},
         "flags": int(r["flags"][i])}
        for i in range(len(r["kinds"])) if r["kinds"][i] == Kind.LAUNCH
    ]  # fmt: skip


def compiled(function: Callable[..., Any], *given: Any) -> list[dict[str, Any]]:
    fast = torch.compile(function)
    return launches(lambda: fast(*given))


@check
def pointwise() -> Any:
    return compiled(lambda x, y: F.gelu(x * 2 + y), rows(), rows())


@check
def broadcast() -> Any:
    return compiled(lambda x, b: x * 2 + b, rows(), rows(COLUMNS))


@check
def of_a_slice() -> Any:
    return compiled(lambda x: x[:, : COLUMNS // 4] * 2, rows())


@check
def in_place() -> Any:
    return compiled(lambda x: x.mul_(2).add_(1), rows())


@check
def softmax() -> Any:
    return compiled(lambda x: torch.softmax(x, -1), rows())


@check
def embedding() -> Any:
    return compiled(lambda table, ids: table[ids] * 2, rows(32000, COLUMNS), torch.arange(ROWS, device="cuda"))


@check
def dynamic_shapes() -> Any:
    fast = torch.compile(lambda x: x * 2 + 1, dynamic=True)
    fast(rows(128, COLUMNS))
    return launches(lambda: fast(rows()))[-1:]


@check
def product_and_sum() -> Any:
    return compiled(lambda x, w: torch.relu(x @ w), rows(), rows(COLUMNS, COLUMNS))


@check
def on_another_stream() -> Any:
    fast, x, side = torch.compile(lambda x: x * 2), rows(), torch.cuda.Stream()
    fast(x)
    with torch.cuda.stream(side):
        return [launches(lambda: fast(x))[-1], side.stream_id]


@check
def optimizer() -> Any:
    parameters = [rows(requires_grad=True) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = rows()
    adam = torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), foreach=True, capturable=True)
    adam.step()
    step = torch.compile(adam.step)
    return launches(step)


class Layer(nn.Module):
    """A norm, a product and a pointwise operator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(COLUMNS), nn.Linear(COLUMNS, COLUMNS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.up(self.norm(x)))


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@check
def modules() -> Any:
    """The whole model, each layer in place, and each layer wrapped."""
    found = []
    for way in range(3):
        model: Any = Model().cuda()
        for i, layer in enumerate(model.layers if way else ()):
            if way == 1:
                layer.compile()
            else:
                model.layers[i] = torch.compile(layer)
        run = model if way else torch.compile(model)
        found.append(launches(lambda: run(rows(requires_grad=True)).backward(rows())))  # noqa: B023
    return found


def attend(mask: BlockMask | None) -> Any:
    fast = torch.compile(flex_attention)
    q, k, v = (rows(2, heads, ROWS, 128, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
    return [
        one for one in launches(lambda: fast(q, k, v, block_mask=mask, enable_gqa=True).backward(q.detach()))
        if "triton_tem" in one["name"]
    ]  # fmt: skip


@check
def flex_causal() -> Any:
    return attend(create_block_mask(lambda _b, _h, q, k: q >= k, None, None, ROWS, ROWS, device="cuda"))


@check
def flex_window() -> Any:
    return attend(
        create_block_mask(lambda _b, _h, q, k: (q >= k) & (q - k < 256), None, None, ROWS, ROWS, device="cuda")
    )


@check
def flex_full() -> Any:
    return attend(None)


def attend_within(attention: Callable[..., Any]) -> Any:
    """Attention within a compiled function, which gives its kernel the buffers that its tensors are views of."""
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, ROWS, ROWS, device="cuda")
    x = rows(2 * ROWS, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    weight = rows(COLUMNS, COLUMNS, dtype=torch.bfloat16)
    fast = torch.compile(lambda x: attention((x @ weight).view(2, ROWS, 8, 128).transpose(1, 2), mask))
    return [one for one in launches(lambda: fast(x).sum().backward()) if "triton_tem" in one["name"]]


@check
def flex_projected() -> Any:
    return attend_within(lambda q, mask: flex_attention(q, q * 2, q + 1, block_mask=mask))


@check
def flex_shared() -> Any:
    return attend_within(lambda q, mask: flex_attention(q, q, q, block_mask=mask))


@check
def flex_shared_by_two() -> Any:
    return attend_within(lambda q, mask: flex_attention(q * 2, q, q, block_mask=mask))


@check
def flex_unknown() -> Any:
    document = (rows(ROWS) > 0).cumsum(0)  # which document a token belongs to was not computed
    return attend(
        create_block_mask(lambda _b, _h, q, k: document[q] == document[k], None, None, ROWS, ROWS, device="cuda")
    )


@check
def autotuned() -> Any:
    torch._inductor.config.max_autotune_gemm = True
    try:
        return compiled(lambda x, w: torch.relu(x @ w), rows(), rows(COLUMNS, COLUMNS))
    finally:
        torch._inductor.config.max_autotune_gemm = False


@check
def reduce_overhead() -> Any:
    fast, x, w = torch.compile(lambda x, w: torch.relu(x @ w), mode="reduce-overhead"), rows(), rows(COLUMNS, COLUMNS)
    EXT.record(True)  # a graph has the nodes that were recorded as it was captured
    for _ in range(3):  # compiles, warms up, captures
        fast(x, w)
    return launches(lambda: fast(x, w))


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask), mask=mask)


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"]
)
@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(x_ptr, n, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * by, mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    scale_kernel[lambda given: (triton.cdiv(n, given["BLOCK"]),)](out, n, 2.0)
    return out


@check
def by_hand() -> Any:
    return launches(lambda: added(rows(), rows()))[-2:]


@check
def by_hand_in_compiled_code() -> Any:
    return compiled(added, rows(), rows())


@check
def by_hand_with_a_product() -> Any:
    a, b, c = (rows(64, 64) for _ in range(3))
    return launches(lambda: dot_kernel[(1,)](a, b, c, SIZE=64))


@check
def summary() -> Any:
    """What torch.compile did, over a function with a graph break and one that is compiled again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    fast = torch.compile(breaks)
    fast(rows(16, 16))
    fast(rows(32, 16))
    found = compilation()
    assert found is not None
    return {
        "graphs": found.graphs, "breaks": [(one.line, one.reason, one.count) for one in found.breaks],
        "recompiled": [(one.line, one.reason, one.count) for one in found.recompiled],
    }  # fmt: skip


@check
def progress() -> Any:
    """What a graph that counts as large prints, forward and backward, and one that does not."""
    printed = []
    for large in (2, 500):
        inductor._LARGE_GRAPH = large
        torch._dynamo.reset()
        fast = torch.compile(lambda x: torch.sin(x) * 3)
        with contextlib.redirect_stderr(io.StringIO()) as output:
            fast(rows(48, 16, requires_grad=True)).sum().backward()
        printed.append([line for line in output.getvalue().splitlines() if line.startswith("refshard")])
    return printed


@check
def wrapper_in_cpp() -> Any:
    try:
        torch.compile(torch.sin, options={"cpp_wrapper": True})(rows(40, 16))
    except Refused as error:
        return str(error)


@check
def chosen_counts() -> Any:
    """Tokens of each of 16 experts, of which each token chooses two: counted in compiled code, and in eager code."""

    def counts(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = scores.topk(2, dim=-1).indices.flatten()
        return F.one_hot(chosen, 16).sum(0), F.one_hot(chosen, 16).sum(0).cumsum(0)

    found = {}
    for rule in ("balanced", "worst"):
        EXT.set_routing(rule, 0.0, 0, 1)
        scores = rows(ROWS, COLUMNS) @ rows(COLUMNS, 16)
        found[rule] = [[one.tolist() for one in run(scores)] for run in (torch.compile(counts), counts)]
    return found


@check
def host_work() -> Any:
    """Calls of Python functions in the call that compiles, and in the next."""
    EXT.count_host_work()
    fast, x, counts = torch.compile(lambda x: torch.cos(x) * 3), rows(), []
    for _ in range(2):
        EXT.clear_recording()
        EXT.record(True)
        fast(x)
        EXT.record(False)
        counts.append(int(EXT.recording()["host_calls"].sum()))
    return counts
