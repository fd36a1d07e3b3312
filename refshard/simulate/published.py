"""Predictions for what others have published, row by row."""

from dataclasses import dataclass

from refshard.flops import flops_per_token
from refshard.plan.checkpointing import checkpointing_of
from refshard.plan.recipe import Recipe, find_recipe
from refshard.simulate.forecast import CONVENTION, Job, forecast_step
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.model import load_model
from refshard.specs.published import PublishedRow, PublishedTable

STANDS_FOR = {"yafsdp": "refshard-yafsdp"}
"""Published strategies without a recipe, and whose recipe predicts them.

Upstream's YaFSDP is other code than the engine's mode of that name, so a case of it has no plan. But the mode follows
its published design (a unit per layer, rings of two buffers), and the published speeds are of that design.
"""


def recipe_of(strategy: str) -> Recipe:
    """The recipe that predicts a published strategy.

    Raises:
        SpecError: there is none.
    """
    return find_recipe(STANDS_FOR.get(strategy, strategy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One published result and its prediction, both in the table's unit.

    ``mfu`` and ``replayed_mfu`` are the published one, where there is one, and what the published result amounts to by
    this project's own FLOPs and peak.
    """

    row: PublishedRow
    ranks: int
    strategy: str
    published: float
    predicted: float
    mfu: float | None
    replayed_mfu: float | None

    @property
    def error(self) -> float:
        """Relative: above 0 where the prediction is larger."""
        return self.predicted / self.published - 1


def predict(table: PublishedTable, cluster: ClusterSpec | None = None) -> tuple[Prediction, ...]:
    """Predict every result of a table, in its order; on nodes like the cluster's, by default the table's own.

    Raises:
        SpecError: a row names what does not exist.
    """
    nodes = cluster or load_cluster(table.cluster)
    return tuple(
        _prediction(table, nodes, row, strategy, published)
        for row in table.rows
        for strategy, published in row.results.items()
    )


def _prediction(
    table: PublishedTable, cluster: ClusterSpec, row: PublishedRow, strategy: str, published: float
) -> Prediction:
    job = Job(
        model=load_model(row.model),
        cluster=cluster.of_nodes(row.nodes),
        seq_len=row.seq_len,
        sequences=row.sequences,
        reduction=table.reduction.get(strategy, "fp32"),
        compiled=row.compiled,
        fused_norms=table.fused_norms,
    )
    step = forecast_step(job, recipe_of(strategy), checkpointing_of(row.checkpointing, job.model.n_layers))
    peak = job.cluster.accelerator.matmul[job.dtype].peak
    return Prediction(
        row=row,
        ranks=job.cluster.world_size,
        strategy=strategy,
        published=published,
        predicted=step.step_time_s if table.unit == "seconds" else step.tokens_per_s_gpu,
        mfu=row.mfu,
        replayed_mfu=None
        if row.mfu is None
        else published * flops_per_token(job.model, row.seq_len, CONVENTION) / peak,
    )
