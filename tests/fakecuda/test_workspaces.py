"""Memory that kernels take for themselves, against sizes worked out from torch 2.13's sources by hand.

An allocation is ``(bytes, after the results, lives for so many further ones)``; -1 is until the operator returns.
"""

from functools import cache
from typing import Any

import pytest

from tests.fakecuda.answers import ask

pytestmark = pytest.mark.processes

A100, L4, H100 = (
    {"major": major, "minor": minor, "multiprocessors": count}
    for major, minor, count in ((8, 0, 108), (8, 9, 58), (9, 0, 132))
)
MIB = 1 << 20
BEFORE, AFTER = False, True
HELD = -1

Allocation = tuple[int, bool, int]
Tensor = tuple[list[int], dict[str, Any]]


def tensor(*sizes: int, dtype: str = "bf16", **more: Any) -> Tensor:
    return list(sizes), {"dtype": dtype, **more}


def rows_first(batch: int, heads: int, sequence: int, dim: int, dtype: str = "bf16") -> Tensor:
    """As projections make it: (batch, heads, sequence, dim), a view of (batch, sequence, heads, dim)."""
    strides = [sequence * heads * dim, dim, heads * dim, 1]
    return tensor(batch, heads, sequence, dim, dtype=dtype, strides=strides)


def question(op: str, *inputs: Tensor, gpu: dict[str, Any] | None = None, **scalars: Any) -> dict[str, Any]:
    return {"op": f"aten::{op}", "inputs": inputs, "scalars": scalars, "capability": H100 if gpu is None else gpu}


Q, KV = rows_first(2, 32, 8192, 128), rows_first(2, 8, 8192, 128)
PLAIN = tensor(2, 32, 8192, 128)
WIDE = rows_first(2, 32, 8192, 256)
SHORT = rows_first(1, 8, 512, 64)
ROWS = 2 * 32 * 8192
FLASH, EFFICIENT, CUDNN = (f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))
TOKENS = tensor(2, 8192, dtype="int64")

CASES: dict[str, tuple[dict[str, Any], list[Allocation]]] = {
    # attention: row sums and dQ in fp32; with grouped queries dK and dV of every query head
    "flash backward": (
        question(f"{FLASH}_backward", Q, Q, Q, Q, Q),
        [(ROWS * 4, AFTER, HELD), (ROWS * 128 * 4, AFTER, HELD)],
    ),
    "flash backward, grouped": (
        question(f"{FLASH}_backward", Q, Q, KV, KV, Q),
        [(ROWS * 4, AFTER, HELD), (ROWS * 128 * 4, AFTER, HELD), *[(ROWS * 128 * 2, AFTER, HELD)] * 2],
    ),
    "flash backward of a contiguous gradient": (
        question(f"{FLASH}_backward", PLAIN, Q, Q, Q, Q),
        [(ROWS * 128 * 2, BEFORE, HELD), (ROWS * 4, AFTER, HELD), (ROWS * 128 * 4, AFTER, HELD)],
    ),
    "flash backward, deterministic, few heads": (
        question(f"{FLASH}_backward", *[rows_first(1, 4, 1000, 72)] * 5, deterministic=True),
        # 1,000 rows are padded to 1,024 and 72 columns to 96; 132 multiprocessors over 4 heads make 33 copies
        [(4 * 1024 * 4, AFTER, HELD), (33 * 4 * 1024 * 96 * 4, AFTER, HELD)],
    ),
    "flash backward, head dimension 160": (
        question(f"{FLASH}_backward", *[rows_first(1, 4, 128, 160)] * 5),
        [(4 * 128 * 4, AFTER, HELD), (4 * 128 * 192 * 4, AFTER, HELD)],
    ),
    "flash backward, packed": (
        question(
            "_flash_attention_backward",
            *[tensor(6000, 32, 128)] * 2,
            *[tensor(6000, 8, 128)] * 2,
            tensor(6000, 32, 128),
            tensor(32, 6000, dtype="fp32"),
            tensor(4, dtype="int32"),
            tensor(4, dtype="int32"),
        ),
        [(32 * 6384 * 4, AFTER, HELD), (32 * 6384 * 128 * 4, AFTER, HELD), *[(6000 * 32 * 128 * 2, AFTER, HELD)] * 2],
    ),
    "flash forward": (question(FLASH, Q, KV, KV), []),
    "flash forward, little work": (
        # 8 heads x 8 blocks of 64 queries for 264 slots; 2 blocks of 256 keys can be split in 2
        question(FLASH, SHORT, SHORT, SHORT),
        [(2 * 8 * 512 * 4, AFTER, HELD), (2 * 8 * 512 * 64 * 4, AFTER, HELD)],
    ),
    "flash forward with dropout is not split": (question(FLASH, SHORT, SHORT, SHORT, dropout_p=0.1), []),
    "efficient forward": (question(EFFICIENT, Q, Q, Q), []),
    "efficient forward, large heads": (question(EFFICIENT, WIDE, WIDE, WIDE), [(ROWS * 256 * 4, AFTER, HELD)]),
    "efficient backward": (
        # tiles of 128 x 128: dQ in fp32 with 4 words of lock and counter a tile
        question(f"{EFFICIENT}_backward", Q, Q, Q, Q),
        [(ROWS * 4, AFTER, HELD), (64 * 64 * (128 * 128 + 4) * 4, AFTER, HELD)],
    ),
    "efficient backward on an L4": (
        # the large tile does not fit into 99 KiB: 64 x 64, and dK and dV of 3 splits of the keys in fp32
        question(f"{EFFICIENT}_backward", Q, Q, Q, Q, gpu=L4),
        [(ROWS * 4, AFTER, HELD), (64 * (2 * 3 * 64 * 128 + 128 * 2 * (64 * 64 + 4)) * 4, AFTER, HELD)],
    ),
    "efficient backward in fp32": (
        question(f"{EFFICIENT}_backward", *[rows_first(2, 4, 1024, 64, "fp32")] * 4),
        [
            (8 * 1024 * 64 * 4, AFTER, 2),
            (8 * 1024 * 4, AFTER, 1),
            (8 * 1024 * 4, AFTER, HELD),
            (8 * 16 * (64 * 64 + 4) * 4, AFTER, HELD),
        ],
    ),
    "cuDNN backward": (question(f"{CUDNN}_backward", Q, Q, KV, KV), [(ROWS * 128 * 4 + ROWS * 4, AFTER, HELD)]),
    "cuDNN forward": (question(CUDNN, Q, KV, KV), []),
    # reductions: blocks that share an output keep 32 lanes of 4 partial sums each
    "sum of rows": (
        question("sum.dim_IntList", tensor(16384, 4096), dim=[0]),
        [(4096 * 66 * 32 * 4 * 4, AFTER, 1), (32 * 4, AFTER, 0)],
    ),
    "sum of rows on an A100": (
        question("sum.dim_IntList", tensor(16384, 4096), dim=[0], gpu=A100),
        [(4096 * 54 * 32 * 4 * 4, AFTER, 1), (32 * 4, AFTER, 0)],
    ),
    "sum of columns": (question("sum.dim_IntList", tensor(16384, 4096), dim=[-1]), []),
    "sum of all": (
        # 512 threads load 4 each: 2,048 values a thread are shared by as many blocks as leave 16 to each
        question("sum", tensor(MIB, dtype="fp32")),
        [(128 * 4, AFTER, 1), (4, AFTER, 0)],
    ),
    "count": (
        question("sum", tensor(2, 8192, dtype="bool")),
        [(2 * 8192 * 8, AFTER, HELD)],
    ),
    "sum in fp32 of bf16 casts nothing": (question("sum.dim_IntList", tensor(64, 64), dim=[0], dtype="fp32"), []),
    "sum in fp64 casts": (
        question("sum.dim_IntList", tensor(64, 64), dim=[0], dtype="fp64"),
        [(64 * 64 * 8, AFTER, HELD)],
    ),
    "norms of a list": (
        question("_foreach_norm.Scalar", *[tensor(4096, 4096)] * 3, tensor(128)),
        [(4 * 256 * 4, BEFORE, HELD)],
    ),
    # normalisations
    "layer norm backward": (question("native_layer_norm_backward", *[tensor(16384, 4096)] * 2), []),
    "layer norm backward, many short rows": (
        question(
            "native_layer_norm_backward",
            *[tensor(131072, 768)] * 2,
            *[tensor(131072, 1, dtype="fp32")] * 2,
            tensor(768),
            tensor(768),
        ),
        # 24 blocks across, so 32,768 / 24 down, each with a row of partial sums; then a sum of those rows
        [*[(1365 * 768 * 2, AFTER, HELD)] * 2, *[(768 * 22 * 32 * 4 * 4, AFTER, 1), (6 * 4, AFTER, 0)] * 2],
    ),
    "rms norm of a transposed tensor": (
        question("_fused_rms_norm", tensor(512, 64, strides=[1, 512]), tensor(64)),
        [(512 * 64 * 2, BEFORE, HELD)],
    ),
    # matrix products: copies of what cuBLAS cannot read
    "product": (question("mm", tensor(64, 128), tensor(128, 32, strides=[1, 128])), []),
    "product with every other column": (
        question("mm", tensor(64, 128, strides=[256, 2]), tensor(128, 32)),
        [(64 * 128 * 2, AFTER, HELD)],
    ),
    "product with a slice": (question("addmm", tensor(32), tensor(64, 128, strides=[384, 1]), tensor(128, 32)), []),
    "batch of products with an expanded factor": (
        question("bmm", tensor(8, 64, 128, strides=[0, 128, 1]), tensor(8, 128, 32, strides=[4096, 0, 0])),
        [(8 * 128 * 32 * 2, AFTER, HELD)],
    ),
    "grouped product": (
        question("_grouped_mm", tensor(16384, 2048), tensor(5, 2048, 1024), tensor(5, dtype="int32")),
        [(6 * 24 + 5 * 12 + 5 * 24, AFTER, HELD)],
    ),
    "grouped product on an A100": (
        question("_grouped_mm", tensor(16384, 2048), tensor(5, 2048, 1024), tensor(5, dtype="int32"), gpu=A100),
        [],
    ),
    # sorting
    "embedding backward of few tokens": (
        question("embedding_dense_backward", tensor(1, 3072, 64), tensor(1, 3072, dtype="int64"), num_weights=1000),
        [],
    ),
    "embedding backward": (
        question("embedding_dense_backward", tensor(2, 8192, 4096), TOKENS, num_weights=1000),
        [
            *[(16384 * 8, BEFORE, HELD)] * 2,
            (16384 * 8, BEFORE, 1),
            # a copy of keys and values, 8 histograms, the look-back of 5 tiles of 3,840, 8 counters
            (2 * 16384 * 8 + 8 * 256 * 8 + 5 * 256 * 4 + 256 + 255, BEFORE, 0),
            (16384 * 8, AFTER, HELD),
            (8, AFTER, HELD),
            *[(1000 * 8, AFTER, HELD)] * 2,
            (8, AFTER, HELD),
            (2638 * 8, AFTER, HELD),
            (2638 * 4096 * 4, AFTER, HELD),
        ],
    ),
    "short sort": (question("sort.stable", tensor(64, 4096), dim=[-1]), [(4096 * 8, AFTER, 0)]),
    "long sort": (
        question("sort.stable", tensor(131072, dtype="int64"), dim=[0]),
        [(131072 * 8, AFTER, HELD), (2 * 131072 * 8 + 8 * 256 * 8 + 35 * 256 * 4 + 256 + 255, AFTER, 0)],
    ),
    "scatter by index": (question("_index_put_impl_", tensor(1000, 64), TOKENS, tensor(2, 8192, 64)), []),
    "sum by index": (
        question("_index_put_impl_", tensor(1000, 64), TOKENS, tensor(2, 8192, 64), accumulate=True),
        # 10 bits for 1,000 rows: two passes
        [*[(16384 * 8, AFTER, HELD)] * 4, (2 * 16384 * 8 + 2 * 256 * 8 + 5 * 256 * 4 + 256 + 255, AFTER, 0)],
    ),
    # copies
    "softmax of a transposed tensor": (
        question("_softmax", tensor(64, 32, strides=[1, 64])),
        [(64 * 32 * 2, AFTER, HELD)],
    ),
    "gradient of a softmax": (
        question("_softmax_backward_data", tensor(64, 32, dtype="fp32"), tensor(64, 32, dtype="fp32")),
        [(64 * 32 * 4, AFTER, HELD)],
    ),
    "copy on the device": (question("copy_", tensor(64, 64), tensor(64, 64, dtype="fp32", strides=[1, 64])), []),
    "copy to the host": (question("copy_", tensor(64, 64, on_device=False), tensor(64, 64)), []),
    "copy of columns to the host": (
        question("copy_", tensor(64, 64, on_device=False), tensor(64, 64, strides=[128, 2])),
        [(64 * 64 * 2, AFTER, HELD)],
    ),
    "copy with a cast to the host": (
        question("copy_", tensor(64, 64, on_device=False, dtype="fp32"), tensor(64, 64), non_blocking=True),
        [(64 * 64 * 4, AFTER, HELD)],
    ),
    "copy with a cast from the host": (
        question("copy_", tensor(64, 64), tensor(64, 64, on_device=False, dtype="fp32"), non_blocking=True),
        [(64 * 64 * 4, AFTER, HELD)],
    ),
    "blocking copy with a cast from the host": (
        question("copy_", tensor(64, 64), tensor(64, 64, on_device=False, dtype="fp32")),
        [],
    ),
    "no rule": (question("add.Tensor", tensor(64), tensor(64)), []),
}


@cache
def answers() -> dict[str, list[Allocation]]:
    found = ask([("workspaces", arguments) for arguments, _ in CASES.values()])
    return {case: [(size, after, lives) for size, after, lives in taken] for case, taken in zip(CASES, found)}


@pytest.mark.parametrize("case", CASES)
def test_takes_what_torch_takes(case: str) -> None:
    assert answers()[case] == CASES[case][1]


def test_frees_scratch_memory_before_the_operator_returns() -> None:
    """An embedding's backward frees the sort's buffers before it makes its result."""
    held = sum(size for size, after, lives in CASES["embedding backward"][1] if lives == HELD)
    before = sum(size for size, after, _ in CASES["embedding backward"][1] if not after)
    efficient = [size for size, *_ in CASES["efficient backward in fp32"][1]]
    found = ask(
        [
            ("most_at_once", CASES["embedding backward"][0]),
            ("most_at_once", CASES["efficient backward in fp32"][0]),
        ]
    )
    assert found == [[before, held], [0, max(sum(efficient[:3]), sum(efficient[2:]))]]


def test_cublas_keeps_a_workspace() -> None:
    """32 MiB since Hopper, 8.125 MiB before, or what CUBLAS_WORKSPACE_CONFIG says; for matrix products alone."""
    small = (2 * 4096 + 8 * 16) << 10
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("", H100, 32 * MIB),
        ("", A100, small),
        ("", {"major": 12}, 32 * MIB),
        (":4096:8", A100, 32 * MIB),
        (":16:8:4096:2", H100, small),
        (":0:0", H100, 0),
        ("nonsense", A100, small),
    ]
    found = ask([("cublas_workspace", {"configuration": text, "capability": gpu}) for text, gpu, _ in cases])
    assert found == [expected for *_, expected in cases]

    operators = {
        "mm": 32 * MIB,
        "addmm": 32 * MIB,
        "baddbmm.out": 32 * MIB,
        "_scaled_mm": 32 * MIB,
        "add.Tensor": 0,
        "_grouped_mm": 0,
        f"{FLASH}_backward": 0,
    }
    found = ask([("persistent_workspace", {"op": f"aten::{op}", "capability": H100}) for op in operators])
    assert found == list(operators.values())
    assert ask([("persistent_workspace", {"op": "aten::_grouped_mm", "capability": A100})]) == [small]
