"""All collectives that a rank issues in a step, summed up from the closed forms of its layers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from refshard.plan.cost_models import MASTER_BYTES, find_cost_model
from refshard.plan.kernels import Share, hidden_bytes, sizes_of
from refshard.plan.layers import (
    Issued,
    around_attention,
    around_embedding,
    around_head,
    around_products,
    norm_gradients,
)
from refshard.specs.job import Job
from refshard.specs.layers import layers_of_stages, stages_of_rank
from refshard.specs.model import ModelSpec


def repeated(issued: Issued, number: float) -> Issued:
    """So many times as often."""
    return replace(issued, count=issued.count * number)


def issued_by_rank(model: ModelSpec, one: Job, rank: int = 0) -> dict[str, tuple[float, float]]:
    """How many of each kind the pipeline's ``rank`` issues in a step, and their bytes together.

    DDP counts as reducing once a step, in one bucket. The mean loss, which a pipeline's last rank sends to the others,
    is left out.
    """
    share = Share(sequences=one.microbatch, seq_len=one.seq_len, tp=one.tp, cp=one.cp, precision=one.precision)
    stages = layers_of_stages(model.n_layers, one.pp * one.interleave, one.implementation.stages)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    hidden_size = hidden_bytes(model, share, casts=find_cost_model(one.strategy).casts)
    for stage in stages_of_rank(rank, one.pp, one.interleave):
        first, last = stage == 0, stage == len(stages) - 1
        # Hidden states go on and their gradients back, so that a stage gets as many as it sends.
        neighbours = one.microbatches * ((not first) + (not last))
        issued = [(found.op, found.nbytes, found.count) for found in _of_stage(
            model, one, share, len(stages[stage]), first=first, last=last
        )]  # fmt: skip
        for op, nbytes, count in (*issued, ("send", hidden_size, neighbours), ("recv", hidden_size, neighbours)):
            counts[op] += count  # type: ignore[assignment]
            sizes[op] += count * nbytes  # type: ignore[assignment]
    return {op: (count, sizes[op]) for op, count in counts.items() if count}


def _of_stage(model: ModelSpec, one: Job, share: Share, layers: int, *, first: bool, last: bool) -> Iterator[Issued]:
    inside: list[Issued] = []
    for which in ("forward", "backward", "again"):
        computed = layers if which != "again" or one.checkpointing == "full" else 0
        products = layers if which == "again" and one.checkpointing == "selective" else computed
        inside += [repeated(found, products) for found in around_products(model, share, which)]
        inside += [repeated(found, computed) for found in around_attention(model, share, which)]
        if which != "again":
            inside += around_embedding(model, share, which) if first else ()
            inside += around_head(model, share, which) if last else ()
    norms = 2 * layers + last
    if one.pp == 1:
        inside += norm_gradients(model, share, share.element, norms)
    else:
        yield from norm_gradients(model, share, MASTER_BYTES, norms)
    yield from (repeated(found, one.microbatches) for found in inside)
    # Gathers and reductions of units: each layer, and what lies around them.
    costs, shards, sizes = find_cost_model(one.strategy), one.dp_shard * one.cp, sizes_of(model, one.tp, 1)
    around = (sizes.embedding if first else 0.0) + (sizes.head if last else 0.0)
    if not costs.shards_optimizer:
        if one.data_ranks * one.cp > 1:
            yield Issued("all_reduce", MASTER_BYTES * (layers * sizes.dense + around))
        return
    staged = one.pp > 1
    passes = 1 if staged or costs.keeps or not one.implementation.reshard else 2
    times = 1 if staged or not costs.shards_parameters else one.microbatches
    reduction = MASTER_BYTES if one.implementation.reduction == "fp32" else 2
    for numel, units, gathers in ((sizes.dense, layers, passes), (around, int(around > 0), 1)):
        if shards > 1:
            yield Issued("all_gather", share.element * numel, units * gathers * times)
            yield Issued("reduce_scatter", reduction * numel, units * times)
        if one.dp_replicate > 1:
            yield Issued("all_reduce", reduction * numel / shards, units * times)
