"""SimpleFSDP (arXiv 2411.00284): parameters that are gathered where they are used, and a compiler that does the rest.

Each parameter is a DTensor behind a parametrization that gathers it; backward of that reduces. The gather is
checkpointed, so backward gathers anew. ``torch.compile`` sees one graph of it all, in which it merges and moves
collectives.
"""

from collections.abc import Iterator
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.loop import PlainLoop
from refshard.strategies.muon_over_dtensors import announce_muon, muon_over_dtensors
from refshard.strategies.peers.simplefsdp_compiler import MIB, Knobs, Plan, check_compiler
from refshard.strategies.world import World

_ATTENTION = [f"self_attn.{projection}_proj" for projection in "qkvo"]
_BLOCK = ["input_layernorm", *_ATTENTION, "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
"""A block's weights in the order of their use."""
_EMBEDDING, _LAST = "model.embed_tokens.weight", ("model.norm.weight", "lm_head.weight")


@final
class SimpleFSDP(Strategy):
    """The paper's idea in torch's own words. ``knobs`` are those of :class:`Knobs`."""

    def __init__(self, **knobs: Any) -> None:
        self._knobs = Knobs(**knobs)

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`. The first pass of each kind compiles, for tens of seconds."""
        check_compiler(world.device)
        self._model, self._world = model, world
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        blocks = [f"model.layers.{index}" for index in range(model.spec.n_layers)]
        self._plan: Plan = [["model.embed_tokens"], *([block] for block in blocks), ["model.norm", "lm_head"]]
        self._used = [_EMBEDDING, *(f"{b}.{part}.weight" for b in blocks for part in _BLOCK), *_LAST]
        shards: dict[Tensor, nn.Parameter] = {}
        for module in list(model.modules()):
            for name, whole in list(module.named_parameters(recurse=False)):
                if whole not in shards:
                    # Even shards: ranks whose graphs differ could order their collectives differently.
                    padded = F.pad(whole.detach(), (0, 0) * (whole.ndim - 1) + (0, -len(whole) % world.shards))
                    shards[whole] = nn.Parameter(distribute_tensor(padded, world.data, [Shard(0)]))
                setattr(module, name, shards[whole])
                register_parametrization(module, name, _Gather(len(whole), world.computed), unsafe=True)
        options = self._knobs.options(self._plan, world.device.type, world.group.rank())
        torch.compiler.reset()  # a process may train more models than dynamo compiles one function for
        compiled = cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False, options=options))
        return PlainLoop(compiled, world, muon=self._make_muon)

    def _make_muon(self, matrices: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        spec, shards = self._model.spec, self._world.shards
        for rows in (spec.dim, spec.ffn_dim, spec.head_dim * spec.n_heads, spec.head_dim * spec.n_kv_heads):
            if rows % shards:
                raise UnsupportedError(
                    f"refshard's SimpleFSDP needs rows divisible by {shards} ranks for Muon, got a matrix of {rows}"
                )
        return muon_over_dtensors(matrices, **options)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: the parametrized parameters that are cut by rows."""
        cut = [n for n, p in self._model.named_parameters() if isinstance(p, DTensor) and p.placements == (Shard(0),)]
        return tuple(_bare(name) for name in cut if name.endswith(".original"))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`: backward gathers again what is not first, as an embedding reads no weight. A
        tied weight is reduced for each of its uses, and in training gathered once for both: equal nodes become one.
        """
        if self._world.shards == 1:
            return ()
        computed = self._world.computed
        if self._world.case.workload == "inference":
            issued = self._merged("all_gather", self._used, computed)
        else:
            uses = [name if name in self._shapes else _EMBEDDING for name in self._used]
            issued = self._merged("all_gather", list(dict.fromkeys(uses)), computed)
            issued += self._merged("all_gather", uses[:0:-1], computed)
            issued += self._merged("reduce_scatter", uses[::-1], torch.float32)
        issued *= self._world.case.microbatches
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
        """See :meth:`Strategy.full_parameters`."""
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
