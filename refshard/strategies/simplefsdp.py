"""SimpleFSDP (arXiv 2411.00284): parameters are gathered where they are used, and a compiler does the rest.

Each parameter is a DTensor behind a parametrization that gathers it; its backward reduces. The gather is checkpointed,
so backward gathers again. ``torch.compile`` sees one graph of it all, in which it merges and moves collectives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.quantities import MIB
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.loop import PlainLoop
from refshard.strategies.optimizer import announce_muon, muon_over_dtensors
from refshard.strategies.world import World

_ATTENTION = [f"self_attn.{projection}_proj" for projection in "qkvo"]
_BLOCK = ["input_layernorm", *_ATTENTION, "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
"""A block's weights in the order of their use."""
_EMBEDDING, _LAST = "model.embed_tokens.weight", ("model.norm.weight", "lm_head.weight")


@final
class SimpleFSDP(Strategy):
    """The paper's idea with torch's own parts. ``knobs`` are those of :class:`_Knobs`."""

    def __init__(self, **knobs: Any) -> None:
        self._knobs = _Knobs(**knobs)

    def wrap(self, model: Llama, world: World) -> Loop:
        """The first pass of each kind compiles, for tens of seconds."""
        check_compiler(world.device)
        self._model, self._world = model, world
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        blocks = [f"model.layers.{index}" for index in range(model.spec.n_layers)]
        self._plan: _Plan = [["model.embed_tokens"], *([block] for block in blocks), ["model.norm", "lm_head"]]
        self._used = [_EMBEDDING, *(f"{b}.{part}.weight" for b in blocks for part in _BLOCK), *_LAST]
        shards: dict[Tensor, nn.Parameter] = {}
        for module in list(model.modules()):
            for name, whole in list(module.named_parameters(recurse=False)):
                if whole not in shards:
                    # Even shards: ranks with different graphs could order their collectives differently.
                    padded = F.pad(whole.detach(), (0, 0) * (whole.ndim - 1) + (0, -len(whole) % world.shards))
                    shards[whole] = nn.Parameter(distribute_tensor(padded, world.data, [Shard(0)]))
                setattr(module, name, shards[whole])
                register_parametrization(module, name, _Gather(len(whole), world.computed), unsafe=True)
        options = self._knobs.options(self._plan, world.device.type, world.group.rank())
        torch.compiler.reset()  # a process may train more models than dynamo compiles one function for
        compiled = cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False, options=options))
        return PlainLoop(compiled, world, whole=self._make_muon)

    def _make_muon(
        self, kind: type[torch.optim.Optimizer], matrices: list[nn.Parameter], **options: Any
    ) -> torch.optim.Optimizer:
        spec, shards = self._model.spec, self._world.shards
        for rows in (spec.dim, spec.ffn_dim, spec.head_dim * spec.n_heads, spec.head_dim * spec.n_kv_heads):
            if rows % shards:
                raise UnsupportedError(
                    f"refshard's SimpleFSDP needs rows divisible by {shards} ranks for Muon, got a matrix of {rows}"
                )
        return muon_over_dtensors(kind, matrices, **options)

    def wrapped_units(self) -> tuple[str, ...]:
        cut = [n for n, p in self._model.named_parameters() if isinstance(p, DTensor) and p.placements == (Shard(0),)]
        return tuple(_bare(name) for name in cut if name.endswith(".original"))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """Backward gathers all but the first weight again: an embedding's reads none. A tied weight is reduced for each
        of its uses, and in training gathered once for both: equal nodes become one.
        """
        if self._world.shards == 1:
            return ()
        computed = self._world.computed
        if self._world.case.job.workload == "inference":
            issued = self._merged("all_gather", self._used, computed)
        else:
            uses = [name if name in self._shapes else _EMBEDDING for name in self._used]
            issued = self._merged("all_gather", list(dict.fromkeys(uses)), computed)
            issued += self._merged("all_gather", uses[:0:-1], computed)
            issued += self._merged("reduce_scatter", uses[::-1], torch.float32)
        issued *= self._world.case.job.microbatches
        return count_collectives([*issued, *announce_muon(self._model, self._world.case)])

    def _merged(self, op: str, names: list[str], dtype: torch.dtype) -> list[tuple[str, int]]:
        merged, last = list[tuple[str, int]](), None
        for name in names:
            rows, *rest = self._shapes.get(name, self._shapes[_EMBEDDING])
            size = torch.Size((rows + -rows % self._world.shards, *rest)).numel() * dtype.itemsize
            entry = next(e for e in self._plan if name.startswith(tuple(f"{module}." for module in e)))
            joined = size + (merged[-1][1] if merged else 0)
            joins = {"none": False, "automatic": joined <= self._knobs.cap_mib * MIB, "by-block": entry is last}
            if merged and joins[self._knobs.bucketing]:
                merged[-1] = (op, joined)
            else:
                merged.append((op, size))
            last = entry
        return merged

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, shard in self._model.named_parameters():
            assert isinstance(shard, DTensor)
            yield _bare(name), shard.full_tensor().detach()[: self._shapes[_bare(name)][0]]


class _Gather(nn.Module):
    """Turns a shard into a parameter of ``rows`` rows in ``dtype``; its gradient is averaged in the shard's dtype."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows, self._dtype = rows, dtype

    def forward(self, shard: DTensor) -> Tensor:
        whole: Tensor = checkpoint(self._whole, shard, use_reentrant=False, preserve_rng_state=False)
        return whole

    def _whole(self, shard: DTensor) -> Tensor:
        whole = shard.redistribute(placements=[Replicate()], forward_dtype=self._dtype, backward_dtype=shard.dtype)
        return whole.to_local(grad_placements=[Partial("avg")])[: self._rows]


def _bare(name: str) -> str:
    return name.replace("parametrizations.", "").removesuffix(".original")


_Plan = list[list[str] | str]
"""Modules with merged collectives, in groups."""
TORCHS_CAP_MIB = 2000.0
"""Torch's default limit of a merged collective (``bucket_cap_mb_by_bucket_idx_default``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knobs:
    """Merge nothing; neighbours, up to ``cap_mib`` each; or each block's, which torch moves a block ahead in the same
    pass. The others start collectives early with ``reorder``: all of them at once, if ``cap_mib`` leaves several.
    """

    bucketing: Literal["none", "automatic", "by-block"] = "none"
    reorder: bool = False
    cap_mib: float = TORCHS_CAP_MIB

    def options(self, plan: _Plan, device: str, rank: int) -> dict[str, Any]:
        """Inductor's options; by-block merges the groups of ``plan``."""
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
    """torch's manual bucketing: merges the collectives of each group of a plan, and starts each a group early.

    On a CPU torch plans without prices here. It prices every product by the GPU's bandwidth, for which it imports
    triton (``get_gpu_dram_gbps``): without this a CPU's compilation ends in "ModuleNotFoundError: No module named
    'triton'". Merging and moving by blocks needs no price.
    """

    plan: _Plan
    device: str
    rank: int

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        name = "estimate_roofline_runtime_ms"
        price = getattr(overlap_scheduling, name, None) if self.device == "cpu" else None  # torch 2.11 has none
        try:
            if price is not None:
                setattr(overlap_scheduling, name, lambda _: 0.0)
            manual_overlap_bucketing(graph.owning_module, self.plan, insert_overlap_deps=True)
        finally:
            if price is not None:
                setattr(overlap_scheduling, name, price)

    def uuid(self) -> str:
        """A merged gather has its rank's number compiled in, and inductor's cache is shared: ranks with equal graphs
        must not find each other's.
        """
        return repr(self)


@dataclass(frozen=True)
class _KeepAttention(CustomGraphPass):
    """Keeps attention's outputs in layers that recompute, on a CPU. torch 2.13 treats attention as random, and where a
    CPU recomputes it with DTensors, it puts the generator's state where a DTensor's mesh should be: "expected all
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
        return repr(self)
