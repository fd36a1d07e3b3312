"""Inductor on the fake device: torch compiles as for the GPU, and the kernels that it generates become launches.

Dynamo, AOTAutograd, the partitioner, inductor's scheduler, fusion and memory planning are torch's own, and so is the
wrapper that calls the kernels. Only the kernels' bodies are not compiled. What a kernel reads and writes is known to
inductor where it generates it; :func:`facts` puts that into the kernel's source as a comment, so that it survives
inductor's caches, and :class:`GeneratedKernel` reads it back.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from refshard.fakecuda import flex_attention
from refshard.fakecuda.chosen_integers import LINE, KnownIntegers, Sources, line_before
from refshard.fakecuda.flex_attention import FlexAttention
from refshard.fakecuda.triton_kernels import ON_HOST, accessed, multiplies
from refshard.fakecuda.without_triton import Refused
from refshard.specs.hardware import HardwareSpec

_COMMENT = "# refshard: "
_CPP_WRAPPER = (
    "inductor's cpp_wrapper builds C++ code with CUDA's headers, which a dry run does not have: unset "
    "torch._inductor.config.cpp_wrapper (or TORCHINDUCTOR_CPP_WRAPPER); kernels and memory are the same without it"
)
_LARGE_GRAPH = 500
"""Operators of a graph that takes inductor so long that users should see it at work."""


def keep_apart(folder: Path) -> None:
    """Keep what inductor and Triton cache in this folder from now on: it is code for a device that does not exist."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def install(ext: ModuleType) -> None:
    """Put the fake device where inductor would compile kernels, allocate and name what it runs."""
    import torch
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._functorch._aot_autograd.runtime_wrappers import _AutogradBackwardCompiler
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.scheduler import Scheduler

    config.compile_threads = 1
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = ext.empty_strided
    torch._C._compiled_module = ext.compiled_module  # type: ignore[attr-defined]
    integers = KnownIntegers(ext)
    setattr(torch._C, LINE, integers.expect)

    triton: Any = AsyncCompile.triton
    define: Any = TritonScheduling.define_kernel
    enter: Any = Scheduler.enter_context
    call: Any = CompiledFxGraph.__call__

    def load(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        if device_str != "cuda":
            return triton(self, kernel_name, source_code, device_str)
        return GeneratedKernel(ext, kernel_name, source_code, integers)

    def define_kernel(self: Any, source: str, nodes: Any, kernel: Any) -> Any:
        from torch._inductor.virtualized import V

        graph: Any = V.graph
        if line := line_before(graph.refshard_sources, kernel, nodes):
            graph.wrapper_code.writeline(line)
        return define(self, f"{source}\n{_COMMENT}{json.dumps(facts(source, nodes, kernel))}\n", nodes, kernel)

    def enter_context(self: Any, node: Any) -> None:
        enter(self, node)
        from torch._inductor.virtualized import V

        V.graph.wrapper_code.writeline(f"torch._C._compiled_module({module_of(node, self.origin_to_index)!r})")

    def run_graph(self: Any, inputs: Sequence[Any]) -> Any:
        ext.compiled(True)
        before, integers.values = integers.values, {}
        try:
            return call(self, inputs)
        finally:
            integers.values = before
            ext.compiled(False)

    _choose_without_benchmarks()
    _follow_lowering()
    _replace(AsyncCompile, triton=load)
    _replace(TritonScheduling, define_kernel=define_kernel)
    _replace(Scheduler, enter_context=enter_context)
    _replace(CompiledFxGraph, __call__=run_graph)
    for compiler, name in ((CatchErrorsWrapper, "__call__"), (_AutogradBackwardCompiler, "get_or_compile")):
        _replace(compiler, **{name: _uncounted(ext, getattr(compiler, name))})


def _follow_lowering() -> None:
    """Name large graphs as they begin, refuse wrappers in C++, and note which buffers hold what operators make."""
    from torch._inductor.graph import GraphLowering

    lower: Any = GraphLowering.run
    lower_node: Any = GraphLowering.run_node

    def run(self: Any, *args: Any) -> Any:
        if self.cpp_wrapper:
            raise Refused(_CPP_WRAPPER)
        if (operators := len(self.module.graph.nodes)) >= _LARGE_GRAPH:
            way = "backward" if self.is_backward else "forward"
            print(f"refshard: torch.compile: {way} graph of {operators:,} operators", file=sys.stderr, flush=True)
        self.refshard_sources = Sources()
        return lower(self, *args)

    def run_node(self: Any, node: Any) -> Any:
        result = lower_node(self, node)
        self.refshard_sources.note(node, result)
        return result

    _replace(GraphLowering, run=run, run_node=run_node)


def _replace(owner: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def take_peaks(ext: ModuleType) -> None:
    """Passes that move collectives weigh them against the device's peaks, which torch asks nvidia-smi for."""
    import torch
    from torch._inductor import utils

    hardware: HardwareSpec = ext.hardware
    dtypes = {torch.float16: "bf16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}

    def tflops(dtype: torch.dtype) -> float:
        if dtype == torch.float32 and hardware.tf32_peak and torch.backends.cuda.matmul.fp32_precision == "tf32":
            return hardware.tf32_peak / 1e12
        rates: Any = hardware.matmul
        return float(rates.get(dtypes.get(dtype), rates["fp32"]).peak / 1e12)

    bandwidth = hardware.memory_peak_bytes_per_s or hardware.memory_bytes_per_s
    _replace(utils, get_device_tflops=tflops, get_gpu_dram_gbps=lambda: bandwidth / 1e9)


def _uncounted(ext: ModuleType, compiles: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what the host does in it is not counted, since compiling is no part of a step."""

    @functools.wraps(compiles)
    def call(*args: Any, **options: Any) -> Any:
        with ext.Uncounted():
            return compiles(*args, **options)

    return call


def _choose_without_benchmarks() -> None:
    """``max-autotune`` benchmarks what could run an operator; nothing runs here, so cuBLAS's and cuDNN's is taken where
    there is one, and otherwise the first of inductor's templates.
    """
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller

    def rank(choice: Any, *_: Any, **__: Any) -> float:
        return 1.0 if isinstance(choice, ExternKernelCaller) else 2.0

    _replace(
        AlgorithmSelectorCache, make_precompile_fn=lambda *_, **__: lambda: None, benchmark_choice=staticmethod(rank),
        benchmark_collective_choice=staticmethod(rank),
    )  # fmt: skip
    _replace(type(benchmarker), benchmark=lambda *_, **__: 1.0, benchmark_gpu=lambda *_, **__: 1.0)


def module_of(node: Any, order: Mapping[Any, int]) -> str:
    """The path, below the compiled module, of the one that the last of a scheduler's node's operators was called in.

    ``order`` has the place of each operator in its graph.
    """
    origins = {e for n in node.get_nodes() if n.node is not None for e in n.node.get_origins()}
    for origin in sorted(origins, key=order.__getitem__, reverse=True):
        stack = origin.meta.get("nn_module_stack") or origin.meta.get("fwd_nn_module_stack")
        if stack:
            path, _ = list(stack.values())[-1]
            return ".".join(re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).split(".")[2:])
    return ""


def facts(source: str, nodes: Iterable[Any], kernel: Any) -> dict[str, Any]:
    """What a kernel does to each tensor that it is given, in their order: the parts that it reads and writes.

    ``flops`` are those of the products in it, 0 if it has none. Kernels of FlexAttention have ``flex`` instead: the
    names of their tensors, and the sizes of a block of the mask in queries and in keys.
    """
    from torch._inductor.codegen.common import ConstexprArg, SizeArg, WorkspaceArg
    from torch._inductor.select_algorithm import TritonTemplateKernel
    from torch._inductor.virtualized import V

    parts = [part for node in nodes if hasattr(node, "get_nodes") for part in node.get_nodes()]
    reads, writes = _dependencies(parts)
    filled = {given.get_name() for part in parts for given in getattr(part.node, "mutated_inputs", None) or ()}
    real = V.graph.scheduler.mutation_real_name
    found: dict[str, Any] = {"reads": [], "writes": []}
    names, buffers = [], []
    definitions, _, arguments, _ = kernel.args.python_argdefs()
    for definition, argument in zip(definitions, arguments):
        if isinstance(argument, (SizeArg, ConstexprArg)):
            continue
        if not isinstance(argument, WorkspaceArg) and V.graph.is_unspec_arg(argument.buffer):
            continue  # a tensor of one element on the CPU, which the wrapper gives as a number
        names.append(definition.name)
        buffers.append(getattr(argument, "buffer", ""))
        if isinstance(argument, WorkspaceArg) or argument.buffer in filled:  # results that a template is given
            found["reads"].append(0)
            found["writes"].append(1)
            continue
        same = _names_of(kernel, argument)
        numel = V.graph.sizevars.optimization_hint(V.graph.get_numel(argument.buffer), fallback=1) or 1
        for side, deps in (("reads", reads), ("writes", writes)):
            mine = {d for d in deps if d.name in same or real.get(d.name) in same}
            if side == "writes" and "out_ptr" not in definition.name:  # what it writes there is another argument
                mine = set()
            if side == "reads" and definition.name.startswith("out_ptr"):
                mine &= writes  # that it adds to
            found[side].append(round(min(1.0, sum(_elements(d) for d in mine) / numel), 6))
    if flex := flex_attention.facts(source, kernel, names, buffers):
        found["flex"] = flex
    elif isinstance(kernel, TritonTemplateKernel):
        found["flops"] = sum(part.estimate_flops() or 0 for part in parts)
    return found


def _names_of(kernel: Any, argument: Any) -> set[str]:
    """Names of all buffers that share an argument's memory within a kernel."""
    for place in kernel.args.inplace_buffers.values():
        if getattr(place, "inner_name", None) == argument.name:
            return {argument.buffer, *place.other_names}
    return {argument.buffer}


def _dependencies(parts: Sequence[Any]) -> tuple[set[Any], set[Any]]:
    """What a kernel reads of the tensors that it is given, and what it writes."""
    from torch._inductor.dependencies import WeakDep

    writes = {dep for part in parts for dep in part.read_writes.writes if not isinstance(dep, WeakDep)}
    made = {dep.name for dep in writes}
    reads = {dep for part in parts for dep in part.read_writes.reads if not isinstance(dep, WeakDep)}
    reads = {dep for dep in reads if dep.name not in made}
    return reads | {dep for dep in writes if getattr(dep, "mode", None) == "atomic_add"}, writes


def _elements(dep: Any) -> int:
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import V

    indirect = getattr(dep, "is_indirect", lambda: False)()
    return int(V.graph.sizevars.optimization_hint(sympy_product(dep.size) if indirect else dep.get_numel(), fallback=1))


class GeneratedKernel:
    """Where inductor's wrapper expects a compiled kernel: records each launch, and computes nothing."""

    def __init__(self, ext: ModuleType, name: str, source: str, integers: KnownIntegers) -> None:
        if not ext.is_dry():
            raise NotImplementedError(ON_HOST)
        self._ext, self._name, self._integers = ext, f"inductor::{name}", integers
        _, marked, comment = source.rpartition(_COMMENT)
        self._facts: dict[str, Any] = json.loads(comment.splitlines()[0]) if marked else {}
        self._user = None if marked else _UserKernel(name, source)
        self._multiplies = multiplies(source) and not self._facts.keys() & {"flops", "flex"}
        flex = self._facts.get("flex")
        self._flex = FlexAttention(ext, flex, backward="backward" in name) if flex else None

    def run(self, *args: Any, stream: int, **_: Any) -> None:
        """Launch it."""
        import torch

        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        parts = self._facts
        if self._user is not None:
            with self._ext.Uncounted():
                parts = self._user.parts(args)
        nbytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        reads = [round(part * size) for part, size in zip(parts["reads"], nbytes, strict=True)]
        writes = [round(part * size) for part, size in zip(parts["writes"], nbytes, strict=True)]
        flops, known = parts.get("flops", 0), True
        operands = list(zip(tensors, reads, writes))
        if self._flex is not None:
            given, operands = operands, self._flex.operands(operands)
            flops, known = self._flex.flops(given, operands)
        self._ext.launch(
            self._name, *map(list, zip(*operands)), flops, stream, products=self._multiplies, value_unknown=not known
        )
        if self._integers.expected:
            with self._ext.Uncounted():
                self._integers.launched(tensors)

    def precompile(self, *_: Any, **__: Any) -> None:
        """Nothing is compiled."""


class _UserKernel:
    """A kernel that somebody wrote and that compiled code launches."""

    def __init__(self, name: str, source: str) -> None:
        from torch._inductor import async_compile

        module: Any = async_compile
        self._kernel = module._load_triton_kernel_from_source(name, source)
        meta = self._kernel.triton_meta
        self._names = [name for name, kind in meta["signature"].items() if kind != "constexpr"]
        self._constants = {**meta["constants"], **self._kernel.configs[0].kwargs}

    def parts(self, args: Sequence[Any]) -> dict[str, list[int]]:
        """Which of its tensors it reads and writes."""
        import torch

        given = dict(zip(self._names, args))
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        read, written = accessed(self._kernel.fn, {**self._constants, **given}, tensors)
        return {"reads": [int(name in read) for name in tensors], "writes": [int(name in written) for name in tensors]}
