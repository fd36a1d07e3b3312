"""Results that others have published, which predictions are held against."""

from typing import Literal

import msgspec

from refshard import resources
from refshard.specs.hardware import Dtype
from refshard.specs.reading import convert, read_toml, within


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration and what was measured of it, by strategy.

    ``results`` are in the table's unit. ``checkpointing`` is a policy, or how many layers, from the first. ``fitted``
    says that the cluster's constants were fitted on this row. ``mfu`` (a fraction) is as published.
    """

    model: str
    nodes: int
    seq_len: int
    sequences: int = 1
    checkpointing: str | int = 0
    compiled: bool = False
    results: dict[str, float]
    fitted: bool = False
    mfu: float | None = None

    def __post_init__(self) -> None:
        for field in ("nodes", "seq_len", "sequences"):
            within(field, getattr(self, field), 1)
        if not self.results or min(self.results.values()) <= 0:
            raise ValueError(f"results must hold at least one strategy, with a value > 0, got {self.results}")


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table: where it comes from, the cluster's profile, in which unit its results are, and what holds for all rows:
    the dtype of reductions by strategy (fp32 where none is given), and whether its models had torch's fused norms.
    ``assumed`` says what of this the source does not tell.
    """

    title: str
    source: str
    cluster: str
    unit: Literal["seconds", "tokens/s/GPU"]
    assumed: str = ""
    reduction: dict[str, Dtype] = {}
    fused_norms: bool = True
    rows: tuple[PublishedRow, ...]


def load_published() -> dict[str, PublishedTable]:
    """Every published table, by name."""
    found = resources.published()
    return {name: convert(read_toml(path), PublishedTable, where=f"published {name}") for name, path in found.items()}
