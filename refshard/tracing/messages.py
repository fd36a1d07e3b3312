"""What the arguments of a collective's events tell: the operation, the size of its message, and its process group.

Arguments come from outside, in any shape: what is not as the profiler writes it tells nothing.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Args = dict[str, Any]

OPERATORS = {
    # c10d operator: (operation, argument that holds the unsharded tensor)
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
"""torch's operators that communicate, without ``c10d::``; barriers move nothing and are left out."""

OF_SHARDS = frozenset(("allgather_", "reduce_scatter_"))
"""Operators whose unsharded tensors are lists within a list, which traces leave out: the argument holds the shards."""
BARRIERS = frozenset(("barrier", "monitored_barrier_"))
GLOO, EMULATED = "gloo:", "emulated:"
"""What the names of the spans begin with in which a collective runs on a CPU: gloo's, and emulated ones."""
_GLOO_RUNS_AS = {"reduce_scatter": "all_reduce"}
"""What gloo calls the run of an operation, where that is another."""

_ELEMENT_BYTES = {
    "double": 8, "float": 4, "half": 2, "bfloat16": 2, "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2,
    "unsigned char": 1, "signed char": 1, "byte": 1, "char": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "complex<float>": 8, "complex<double>": 16,
}  # fmt: skip
_NAMES = (
    # What a kernel's name or "Collective name" contains, without underscores and in lower case; first match wins.
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("send", "send"),
    ("recv", "recv"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)
_RANK = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as far as it is known: a name with its ranks, and how many these are."""

    name: str | None = None
    size: int | None = None


def operation_of(name: str) -> str:
    """The operation of a kernel or annotation.

    >>> operation_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)"), operation_of("_allgather_base")
    ('reduce_scatter', 'all_gather')
    """
    plain = name.lower().replace("_", "").partition("(")[0]
    return next((op for part, op in _NAMES if part in plain), name)


def run_of(op: str, *, emulated: bool) -> str:
    """The name of the span in which an operation runs on a CPU.

    >>> run_of("reduce_scatter", emulated=False), run_of("reduce_scatter", emulated=True)
    ('gloo:all_reduce', 'emulated:reduce_scatter')
    """
    return EMULATED + op if emulated else GLOO + _GLOO_RUNS_AS.get(op, op)


def element_bytes(dtype: Any) -> int | None:
    """Bytes of an element, by the names that operators and NCCL's annotations use.

    >>> element_bytes("c10::BFloat16"), element_bytes("Float"), element_bytes("TensorList")
    (2, 4, None)
    """
    return _ELEMENT_BYTES.get(dtype.removeprefix("c10::").lower()) if isinstance(dtype, str) else None


def shape_of(args: Args, argument: int) -> tuple[int | None, Any]:
    """Elements of an operator's argument, over all tensors of a list, and its dtype; None where that is not recorded.

    A list hides its tensors' dtype.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list) and min(len(dims), len(types)) > argument):
        return None, None
    shapes = dims[argument] if types[argument] == "TensorList" else [dims[argument]]
    return _elements(shapes), types[argument]


def sent_and_received(args: Args) -> tuple[int | None, int | None]:
    """Elements of the message, as NCCL's annotation gives them; of gloo's, its first tensor for both."""
    sent, received = (whole(args.get(key)) for key in ("In msg nelems", "Out msg nelems"))
    if sent is None and received is None:
        sent, _ = shape_of(args, 0)
    return sent, received


def dtype_of(args: Args) -> str | None:
    """The elements' type."""
    dtype = args.get("dtype")
    if not isinstance(dtype, str):
        types = args.get("Input type")
        dtype = types[0] if isinstance(types, list) and types else None
    return dtype if isinstance(dtype, str) and dtype != "TensorList" else None


def bytes_of_message(op: str, args: Args) -> int | None:
    """Size of the unsharded tensor: the larger of what goes in and what comes out; None if only a shard is known."""
    sent, received = sent_and_received(args)
    element, counts = element_bytes(dtype_of(args)), [n for n in (sent, received) if n is not None]
    if element is None or not counts or (op in ("all_gather", "gather") and received is None):
        return None
    return element * max(counts)


def groups_of(info: Any) -> dict[str, list[int]]:
    """Ranks of the process groups by name, as the trace's distributed metadata gives them."""
    config = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for group in config if isinstance(config, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            found[str(group.get("pg_name"))] = [rank for rank in group["ranks"] if whole(rank) is not None]
    return found


def group_of(args: Args, groups: dict[str, list[int]]) -> Group:
    """The process group that a collective's arguments name; its ranks come from them or from the metadata.

    Where all groups hold the same ranks, one that is not named has as many.
    """
    name, ranks = args.get("Process Group Name"), str(args.get("Process Group Ranks") or "")
    members = [int(n) for n in _RANK.findall(ranks)] if "..." not in ranks else []
    if not members and isinstance(name, str):
        members = groups.get(name, [])
    size = whole(args.get("Group size")) or len(members) or None
    if size is None and len({tuple(every) for every in groups.values()}) == 1:
        size = len(next(iter(groups.values()))) or None
    if not isinstance(name, str):
        return Group(size=size)
    return Group(name=f"{name} [{_ranges(members)}]" if members else name, size=size)


def _elements(shapes: Any) -> int | None:
    if not isinstance(shapes, list) or not shapes:
        return None
    counts = [_product(shape) for shape in shapes]
    return None if None in counts else sum(n for n in counts if n is not None)


def _product(shape: Any) -> int | None:
    if not isinstance(shape, list) or not all(whole(n) is not None for n in shape):
        return None
    return math.prod(shape)


def whole(value: Any) -> int | None:
    """A number of things, or None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in few words.

    >>> _ranges([0, 1, 2, 3, 8])
    '0-3, 8'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
