"""What SimpleFSDP asks of inductor: options of ``torch.compile``, and a compiler to be there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch.utils.checkpoint import CheckpointPolicy

from refshard.errors import UnsupportedError

Plan = list[list[str] | str]
"""Modules whose collectives are merged, in groups."""
MIB = 1024 * 1024
TORCHS_CAP_MIB = 2000.0
"""What torch merges at most, unless told otherwise (``bucket_cap_mb_by_bucket_idx_default``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Merge nothing; neighbours, up to ``cap_mib`` each; or each block's, which torch moves a block ahead in the same
    pass. The others start collectives early with ``reorder``: all of them at once, where ``cap_mib`` leaves several.
    """

    bucketing: Literal["none", "automatic", "by-block"] = "none"
    reorder: bool = False
    cap_mib: float = TORCHS_CAP_MIB

    def options(self, plan: Plan, device: str, rank: int) -> dict[str, Any]:
        """Inductor's options; ``plan`` says what by-block merges."""
        options: dict[str, Any] = {"joint_custom_pre_pass": _KeepAttention(device, rank)}
        if self.bucketing == "automatic":
            for op in ("all_gathers", "reduce_scatters"):
                options[f"bucket_{op}_fx"] = "all"
                if self.cap_mib != TORCHS_CAP_MIB:  # inductor caches nothing that a function decides
                    options[f"bucket_{op}_fx_bucket_size_determinator"] = lambda _: self.cap_mib
        elif self.bucketing == "by-block":
            options["post_grad_custom_post_pass"] = _ByBlock(plan, device, rank)
            options["reorder_for_peak_memory"] = False  # would undo some of it; torchtitan switches it off too
        if self.reorder:
            move = "reorder_communication_preserving_peak_memory"
            options["reorder_for_compute_comm_overlap"] = True
            options["reorder_for_compute_comm_overlap_passes"] = [move, "sink_waits_iterative", move]
        return options


def check_compiler(device: torch.device) -> None:
    """Raises UnsupportedError on a CPU where nothing compiles C++, which is what inductor writes for it."""
    try:
        if device.type == "cpu":
            get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UnsupportedError(f"torch.compile needs a C++ compiler (g++, or set CXX): {error}") from None


@dataclass(frozen=True)
class _ByBlock(CustomGraphPass):
    """torch's manual bucketing: merges the collectives of each group of a plan, and starts each a group early."""

    plan: Plan
    device: str
    rank: int

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        with _unpriced(self.device):
            manual_overlap_bucketing(graph.owning_module, self.plan, insert_overlap_deps=True)

    def uuid(self) -> str:
        """See :meth:`CustomGraphPass.uuid`. A merged gather has its rank's number compiled in, and inductor's cache is
        shared: ranks whose graphs are alike must not find each other's.
        """
        return repr(self)


@dataclass(frozen=True)
class _KeepAttention(CustomGraphPass):
    """Keeps attention's outputs in layers that recompute, on a CPU. torch 2.13 takes attention for random, and where a
    CPU recomputes it beside DTensors, it puts the generator's state where a DTensor's mesh should be: "expected all
    tensors_saved_with_vc_check to be Tensors".
    """

    device: str
    rank: int

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes if self.device == "cpu" else ():
            if "recompute" in node.meta and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                del node.meta["recompute"]
                for output in node.users:
                    output.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> str:
        """See :meth:`_ByBlock.uuid`, which holds for all merged gathers."""
        return repr(self)


@contextmanager
def _unpriced(device: str) -> Iterator[None]:
    """On a CPU, let torch plan without prices. It prices every product by the GPU's bandwidth, for which it imports
    triton (``get_gpu_dram_gbps``): without this a CPU's compilation ends in "ModuleNotFoundError: No module named
    'triton'". What is merged and moved by blocks follows from the blocks, and needs no price.
    """
    name = "estimate_roofline_runtime_ms"
    price = getattr(overlap_scheduling, name, None)  # torch 2.11 has none, and asks for no price
    if device != "cpu" or price is None:
        yield
        return
    setattr(overlap_scheduling, name, lambda _: 0.0)
    try:
        yield
    finally:
        setattr(overlap_scheduling, name, price)
