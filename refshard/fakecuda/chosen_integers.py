"""Integers that follow from a choice, such as tokens of each expert, in kernels that inductor generates.

A generated kernel computes nothing, but the host may read its integers next, and sizes of tensors may follow from them.
Where inductor generates a kernel, :func:`line_before` finds out how its integers follow from those that operators made,
and puts that into the wrapper before the launch. :class:`KnownIntegers` computes it on the host.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

LINE = "_chosen_integers"
"""What the wrapper calls, an attribute of ``torch._C``, where it always looks."""
_DTYPES = ("torch.bool", "torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


class Sources:
    """Buffers that a graph is given or that its operators write, by the node of the graph that makes them."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names.values()

    def note(self, node: Any, lowered: Any) -> None:
        """What inductor made of a node."""
        from torch._inductor import ir

        buffer = lowered.data.data if isinstance(getattr(lowered, "data", None), ir.StorageBox) else None
        if isinstance(buffer, (ir.InputBuffer, ir.ExternKernel)):
            self._names[node] = buffer.get_name()

    def function_of(self, node: Any) -> dict[str, Any] | None:
        """The code of a function that makes a node's integers, and its arguments: names of ``sources``.

        None if they follow from other values than integers, or from sizes.
        """
        import torch
        from torch.fx import Graph, GraphModule, Node

        graph = Graph()
        made: dict[Node, Node] = {}
        sources: list[str] = []

        def copy(one: Node) -> Node:
            if one in made:
                return made[one]
            value = one.meta.get("val")
            if not isinstance(value, torch.Tensor) or str(value.dtype) not in _DTYPES:
                raise _OtherValuesError
            if name := self._names.get(one):
                sources.append(name)
                made[one] = graph.placeholder(f"source_{len(sources)}")
                return made[one]
            if one.op != "call_function" or not isinstance(one.target, torch._ops.OpOverload):
                raise _OtherValuesError
            made[one] = graph.node_copy(one, copy)
            if "device" in made[one].kwargs:
                made[one].kwargs = {**made[one].kwargs, "device": torch.device("cpu")}
            return made[one]

        try:
            graph.output(copy(node))
        except _OtherValuesError:
            return None
        return {"sources": sources, "code": GraphModule({}, graph).code} if sources else None


class _OtherValuesError(Exception):
    """Integers follow from floats, or from sizes."""


def line_before(sources: Sources, kernel: Any, nodes: Iterable[Any]) -> str | None:
    """The wrapper's line before a kernel's launch; None if the kernel has nothing to do with such integers."""
    from torch._inductor.codegen.common import ConstexprArg, SizeArg, TensorArg
    from torch._inductor.virtualized import V

    parts = [part for node in nodes if hasattr(node, "get_nodes") for part in node.get_nodes()]
    origins = {part.node.get_name(): part.node.get_origin_node() for part in parts if part.node is not None}
    given: list[str | None] = []
    functions: dict[int, Any] = {}
    for argument in kernel.args.python_argdefs()[2]:
        if isinstance(argument, (SizeArg, ConstexprArg)):
            continue
        if isinstance(argument, TensorArg) and V.graph.is_unspec_arg(argument.buffer):
            continue  # a number, by then
        integers = isinstance(argument, TensorArg) and str(argument.dtype) in _DTYPES
        given.append(argument.buffer if integers and argument.buffer in sources else None)
        origin = origins.get(argument.buffer) if integers else None
        if origin is not None and (function := sources.function_of(origin)):
            functions[len(given) - 1] = function
    return f"torch._C.{LINE}({json.dumps((given, functions))!r})" if any(given) or functions else None


class KnownIntegers:
    """The integers that the kernels of a running graph were given: ``values``, anew in each graph.

    ``expected`` is what the line before a launch said of it. Both are plain attributes, since the host's calls count.
    """

    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        self.values: dict[str, Any] = {}
        self.expected = ""

    def expect(self, line: str) -> None:
        """Called in the line before a launch."""
        self.expected = line

    def launched(self, tensors: Sequence[Any]) -> None:
        """Give the kernel's results their integers, if these follow from a choice."""
        (given, functions), self.expected = json.loads(self.expected), ""
        for name, tensor in zip(given, tensors, strict=True):
            if name is not None and name not in self.values:
                self.values[name] = self._ext.known_integers(tensor)
        for place, function in functions.items():
            known = [found for name in function["sources"] if (found := self.values.get(name))]
            if len(known) == len(function["sources"]) and any(chosen for _, chosen in known):
                self._ext.assume_integers(tensors[int(place)], _run(function["code"], [one for one, _ in known]))


def _run(code: str, given: Sequence[Any]) -> Any:
    import torch

    found: dict[str, Callable[..., Any]] = {}
    exec(code, {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}, found)
    return found["forward"](None, *given)
