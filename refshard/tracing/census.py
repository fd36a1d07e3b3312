"""Every operator that a step asks of torch, in order: exact where a time is noisy.

An extra copy is one operator more, a prefetch that comes late another order, a temporary more bytes; no clock is needed
to see them. Collectives of torch's process groups are operators too, and stand where the host issues them.
"""

import hashlib
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refshard.records import Census


class OperatorCensus(TorchDispatchMode):
    """Notes what runs inside. Each operator then takes some microseconds longer, so no time is taken there.

    Of what is compiled it sees the operators that remain, collectives and matrix products mostly, and once the call of
    the compiled code as a whole: what is fused has no operator, and its buffers are allocated without one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[Any] = []
        self._allocations = self._allocated_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run: torch refuses to beneath a mode that does not allow it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operators.append(func)
        held = _storages((args, kwargs))
        for storage, size in _storages(result).items():
            if storage not in held:
                self._allocations += 1
                self._allocated_bytes += size
        return result

    @property
    def operators(self) -> tuple[str, ...]:
        """Their names in the host's order, such as ``aten.mm.default``."""
        return tuple(map(str, self._operators))

    @property
    def census(self) -> Census:
        """What they come to."""
        order = hashlib.sha256("\n".join(self.operators).encode()).hexdigest()
        return Census(
            operators=len(self._operators),
            allocations=self._allocations,
            allocated_bytes=self._allocated_bytes,
            order_sha256=order,
        )


def _storages(nested: Any) -> dict[int, int]:
    """Size in bytes of each storage that plain tensors in ``nested`` lie in, by its address; empty ones have none.

    A tensor of another class (a DTensor, say) wraps plain ones, and has no memory of its own.
    """
    tensors = (leaf for leaf in tree_leaves(nested) if type(leaf) in (Tensor, Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
