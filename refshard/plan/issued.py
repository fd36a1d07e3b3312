"""Collectives and messages that one rank issues in a step, as torch's parallelism does and the closed forms price them.

Sizes are bytes of the whole tensor, as records count them: what an all-gather makes, what a reduction is given. A test
holds them to dry runs of the real code.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from refshard.plan.activations import hidden_bytes
from refshard.plan.kernels import Share, projected_width
from refshard.plan.sizes import sizes_of
from refshard.plan.ways import MASTER_BYTES, Way, find_way
from refshard.specs.cluster import CollectiveOp
from refshard.specs.configuration import Configuration
from refshard.specs.layers import layers_of_stages, stages_of_rank
from refshard.specs.model import ModelSpec

Pass = Literal["forward", "backward", "again"]
"""Passes through a layer; what is checkpointed is computed again."""


@dataclass(frozen=True, slots=True)
class Issued:
    """As many collectives of one kind and size."""

    op: CollectiveOp
    nbytes: float
    count: float = 1

    def times(self, number: float) -> "Issued":
        """So many times as often."""
        return Issued(self.op, self.nbytes, self.count * number)


def around_products(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """Within one layer over tensor-parallel ranks: a sublayer's input is gathered and its sum scattered, twice; the
    last sum is not computed again.
    """
    if share.tensor == 1:
        return ()
    nbytes = _stream(model, share)
    return Issued("all_gather", nbytes, 2), Issued("reduce_scatter", nbytes, 1 if which == "again" else 2)


def around_embedding(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """Each tensor-parallel rank looks up its part of the vocabulary; the parts are summed."""
    if share.tensor == 1:
        return ()
    return (Issued("reduce_scatter" if which == "forward" else "all_gather", _stream(model, share)),)


def around_head(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """The head's input, and of each token the largest logit, the sum of the exponentials and the target's logit."""
    if share.tensor == 1:
        return ()
    if which == "backward":
        return (Issued("reduce_scatter", _stream(model, share)),)
    return Issued("all_gather", _stream(model, share)), Issued("all_reduce", share.tokens * 4, 3)


def of_norms(model: ModelSpec, share: Share, element: int, norms: int = 2) -> tuple[Issued, ...]:
    """The gradients of a layer's norms, each of which has seen its rank's part of the sequence."""
    return (Issued("all_reduce", model.dim * element, norms),) if share.tensor > 1 else ()


def around_attention(model: ModelSpec, share: Share, which: Pass) -> tuple[Issued, ...]:
    """Torch's context parallelism: keys and values are gathered, their gradients go from rank to rank in fp32."""
    if share.context == 1:
        return ()
    gathered = Issued("all_gather", share.context * share.element * _key_value(model, share))
    if which != "backward":
        return (gathered,)
    return gathered, Issued("all_to_all", MASTER_BYTES * _key_value(model, share), share.context)


def issued_by_rank(model: ModelSpec, one: Configuration, seq_len: int, rank: int = 0) -> dict[str, tuple[float, float]]:
    """How many of each kind the pipeline's ``rank`` issues in a step, and their bytes together.

    DDP counts as reducing once a step, whatever its buckets. The mean loss, which a pipeline's last rank tells the
    others, is left out.
    """
    share = Share(
        sequences=one.microbatch, seq_len=seq_len, tensor=one.tensor, context=one.context, precision=one.precision
    )
    stages = layers_of_stages(model.n_layers, one.pipeline * one.interleave)
    found: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    hidden = hidden_bytes(model, share, casts=find_way(one.strategy).casts)
    for stage in stages_of_rank(rank, one.pipeline, one.interleave):
        first, last = stage == 0, stage == len(stages) - 1
        for issued in _of_stage(model, one, share, len(stages[stage]), first=first, last=last):
            found[issued.op] += issued.count  # type: ignore[assignment]
            sizes[issued.op] += issued.count * issued.nbytes  # type: ignore[assignment]
        # Hidden states go on and their gradients back, so that a stage gets as many as it sends.
        neighbours = one.microbatches * ((not first) + (not last))
        for message in ("send", "recv"):
            found[message] += neighbours
            sizes[message] += neighbours * hidden  # type: ignore[assignment]
    return {op: (count, sizes[op]) for op, count in found.items() if count}


def _of_stage(
    model: ModelSpec, one: Configuration, share: Share, layers: int, *, first: bool, last: bool
) -> Iterator[Issued]:
    way, several = find_way(one.strategy), one.microbatches
    inside: list[Issued] = []
    for which in ("forward", "backward", "again"):
        again = layers if one.checkpointing == "full" else 0
        computed = again if which == "again" else layers
        products = layers if which == "again" and one.checkpointing == "selective" else computed
        inside += [found.times(products) for found in around_products(model, share, which)]
        inside += [found.times(computed) for found in around_attention(model, share, which)]
        if which != "again":
            inside += around_embedding(model, share, which) if first else ()
            inside += around_head(model, share, which) if last else ()
    norms = 2 * layers + last
    if one.pipeline == 1:
        inside += of_norms(model, share, share.element, norms)
    else:
        yield from of_norms(model, share, MASTER_BYTES, norms)
    yield from (found.times(several) for found in inside)
    yield from _over_data(model, one, share, way, layers, first=first, last=last)


def _over_data(
    model: ModelSpec, one: Configuration, share: Share, way: Way, layers: int, *, first: bool, last: bool
) -> Iterator[Issued]:
    """Gathers and reductions of the units of a stage: each layer, and what lies around them."""
    sizes, shards = sizes_of(model, one.tensor, 1), one.shard * one.context
    around = (sizes.embedding if first else 0.0) + (sizes.head if last else 0.0)
    if not way.shards_optimizer:
        if one.replicate * shards > 1:
            yield Issued("all_reduce", MASTER_BYTES * (layers * sizes.dense + around))
        return
    staged = one.pipeline > 1
    passes = 1 if staged or way.keeps or not one.reshard else 2
    times = 1 if staged or not way.shards_parameters else one.microbatches
    reduction = MASTER_BYTES if one.reduction == "fp32" else 2
    for numel, units, gathers in ((sizes.dense, layers, passes), (around, int(around > 0), 1)):
        if shards > 1:
            yield Issued("all_gather", share.element * numel, units * gathers * times)
            yield Issued("reduce_scatter", reduction * numel, units * times)
        if one.replicate > 1:
            yield Issued("all_reduce", reduction * numel / shards, units * times)


def _stream(model: ModelSpec, share: Share) -> float:
    return share.tokens * model.dim * share.element


def _key_value(model: ModelSpec, share: Share) -> float:
    """Elements of a rank's keys and values."""
    return share.tokens * (projected_width(model) - model.n_heads * model.head_dim) / share.tensor
