"""FlexAttention's kernels: the tensors that they attend to, and their FLOPs by the blocks that their mask leaves."""

import functools
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_LARGEST_MASK = 1 << 30
"""Bytes: that of 32,768 queries and keys, without a batch."""
_CAUSAL_PART = 0.5
"""Part of the scores that a block mask leaves, where its values were not computed."""
Operand = tuple[Any, int, int]
"""A tensor, and the bytes that a kernel reads and writes there."""


def compute_masks(ext: ModuleType) -> None:
    """Compute the masks of FlexAttention, which are large, where their values are known: its kernels' FLOPs depend on
    the blocks that a mask leaves.
    """
    import torch
    from torch.nn.attention import flex_attention

    create = flex_attention.create_block_mask

    @functools.wraps(create)
    def create_block_mask(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return create(*args, **options)
        before = ext.keep_values(_LARGEST_MASK)
        try:
            return create(*args, **options)
        finally:
            ext.keep_values(before)

    flex_attention.create_block_mask = create_block_mask


def facts(source: str, kernel: Any, names: Sequence[str], buffers: Sequence[str]) -> dict[str, Any] | None:
    """What :class:`FlexAttention` has to know of a kernel with such tensors; None if it is another kernel.

    Queries, keys and values come as the buffers that they lie in; what lies in the same one comes once.
    """
    if "SPARSE_KV_BLOCK_SIZE" not in source:
        return None
    attended = [kernel.named_input_nodes[name] for name in "QKV"]
    return {
        "names": names, "attended": [{"tensor": buffers.index(one.get_name()), **_place_of(one)} for one in attended],
        "block": [_block_size(source, name) for name in ("Q", "KV")],
    }  # fmt: skip


def _block_size(source: str, name: str) -> int:
    found = re.search(rf"SPARSE_{name}_BLOCK_SIZE\s*:\s*tl\.constexpr\s*=\s*(\d+)", source)
    return int(found[1]) if found else 128


def _place_of(node: Any) -> dict[str, Any]:
    """Where a tensor lies in its buffer: the offset, sizes and strides; ``fixed`` if none of these is symbolic."""
    from torch._inductor.virtualized import V

    layout = node.get_layout()
    parts = {"offset": [layout.offset], "size": layout.size, "stride": layout.stride}
    hint = functools.partial(V.graph.sizevars.optimization_hint, fallback=1)
    fixed = not any(getattr(one, "free_symbols", ()) for part in parts.values() for one in part)
    return {"fixed": fixed, **{name: [int(hint(one)) for one in part] for name, part in parts.items()}}


def view_of(buffer: Any, at: Mapping[str, Any]) -> Any:
    """The tensor that lies at such a place in a buffer, in the order of its own dimensions.

    Raises:
        NotImplementedError: sizes vary, and the buffer has other dimensions than the tensor.
    """
    if at["fixed"]:
        return buffer.as_strided(at["size"], at["stride"], *at["offset"])
    if buffer.dim() != len(at["size"]):
        raise NotImplementedError(
            "a dry run does not know the sizes of FlexAttention's tensors where they vary and lie in another tensor: "
            "compile with dynamic=False"
        )
    in_memory = sorted(range(buffer.dim()), key=lambda dim: -at["stride"][dim])
    return buffer.permute(*(in_memory.index(dim) for dim in range(buffer.dim())))


class FlexAttention:
    """One kernel, by its :func:`facts`."""

    def __init__(self, ext: ModuleType, found: Mapping[str, Any], *, backward: bool) -> None:
        self._ext, self._backward = ext, backward
        self._names, self._attended, self._block = found["names"], found["attended"], found["block"]

    def operands(self, given: Sequence[Operand]) -> list[Operand]:
        """Queries, keys and values first, each with its own shape; then the other tensors."""
        places = [at["tensor"] for at in self._attended]
        with self._ext.Uncounted():
            views = [view_of(given[place][0], at) for place, at in zip(places, self._attended)]
        first = [place not in places[:n] for n, place in enumerate(places)]
        attended = [
            (view, *(given[place][1:] if counts else (0, 0))) for view, place, counts in zip(views, places, first)
        ]
        return [*attended, *(one for place, one in enumerate(given) if place not in places)]

    def flops(self, given: Sequence[Operand], operands: Sequence[Operand]) -> tuple[int, bool]:
        """FLOPs of the blocks that the mask leaves, and whether that mask was known."""
        query, key, value = (one for one, *_ in operands[:3])
        (batch, heads, queries, _), keys = query.shape, key.shape[2]
        everything = float(batch * heads * queries * keys)
        if self._block[0] >= queries and self._block[1] >= keys:  # no mask, for which torch makes one of one block
            return self._products(everything, key, value), True
        pairs, known = 0.0, True
        for name, (tensor, *_) in zip(self._names, given, strict=True):
            if name in ("arg_KV_NUM_BLKS", "arg_FULL_KV_NUM_BLKS"):
                blocks = self._ext.known_sum(tensor)
                known = known and blocks is not None
                shared = batch * heads / (tensor.shape[0] * tensor.shape[1])
                pairs += (blocks or 0) * shared * self._block[0] * self._block[1]
        return self._products(min(pairs, everything) if known else everything * _CAUSAL_PART, key, value), known

    def _products(self, pairs: float, key: Any, value: Any) -> int:
        """FLOPs of so many pairs of a query and a key."""
        width: int = (3 if self._backward else 1) * key.shape[3] + (2 if self._backward else 1) * value.shape[3]
        return round(2 * pairs * width)
