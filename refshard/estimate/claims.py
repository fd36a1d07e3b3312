"""Published claims beside the ratios that the closed forms give."""

from collections.abc import Mapping
from dataclasses import dataclass

from refshard.errors import SpecError
from refshard.estimate.published import Published, predicted, published_of
from refshard.specs.published_claims import Claim, ClaimTable, Figure, load_claims
from refshard.specs.published_parallel import ParallelTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run of a claim: its predicted step time (seconds) and peak of allocated memory (GiB)."""

    published: Published
    seconds: float
    allocated_gib: float

    def figure(self, name: Figure) -> float:
        """Tokens per second and GPU, seconds, or GiB."""
        one = self.published
        if name == "throughput":
            return one.configuration.global_batch * one.seq_len / self.seconds / one.run.gpus
        return self.seconds if name == "step time" else self.allocated_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedClaim:
    """A claim of a table, and its runs; None where the source lacks them."""

    table: str
    source: str
    claim: Claim
    claimed: Side | None = None
    baseline: Side | None = None

    @property
    def ratio(self) -> float | None:
        """The predicted figure of the claimed run over that of the baseline."""
        if self.claimed is None or self.baseline is None:
            return None
        return self.claimed.figure(self.claim.figure) / self.baseline.figure(self.claim.figure)


def predicted_claims(tables: Mapping[str, ClaimTable] | None = None) -> list[PredictedClaim]:
    """The claims of tables, by default of all that ship, in their order.

    Raises:
        SpecError: a table breaks its schema, or a run that is given cannot be predicted.
    """
    return [
        _predicted(name, table, claim)
        for name, table in (load_claims() if tables is None else tables).items()
        for claim in table.claims
    ]


def _predicted(name: str, table: ClaimTable, claim: Claim) -> PredictedClaim:
    if claim.claimed is None or claim.baseline is None:
        return PredictedClaim(table=name, source=table.source, claim=claim)
    runs = ParallelTable(
        title=table.title, source=table.source, clusters=table.clusters, assumed=table.assumed,
        runs=(claim.claimed, claim.baseline),
    )  # fmt: skip
    made: list[Published] = []
    for side, run in zip(("claimed", "baseline"), runs.runs):
        one = published_of(name, runs, run)
        if isinstance(one, str):
            raise SpecError(f"claims {name}: '{claim.name}': the {side} run cannot be predicted: {one}; complete it")
        made.append(one)
    claimed, baseline = (
        Side(published=one, seconds=seconds, allocated_gib=peak) for one, (seconds, peak) in zip(made, predicted(made))
    )
    return PredictedClaim(table=name, source=table.source, claim=claim, claimed=claimed, baseline=baseline)
