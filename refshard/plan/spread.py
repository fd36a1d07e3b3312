"""How far published step times lie from their predictions, by kind of configuration: the error bars of a plan.

``python -m validation.fit --write-spread`` writes the figures to ``profiles/spread.toml``, from the published runs that
it did not fit.
"""

import msgspec

from refshard import resources
from refshard.specs.configuration import Configuration
from refshard.specs.reading import convert, read_toml


class KindSpread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of ``count`` held-out runs: the median absolute error, and the 10th and 90th percentile of published over
    predicted step time.
    """

    count: int
    median: float
    low: float
    high: float


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By kind; ``all`` is of every held-out run, and stands for kinds with none of their own."""

    kinds: dict[str, KindSpread]

    def of(self, kind: str) -> KindSpread:
        """The figures of a kind."""
        return self.kinds.get(kind) or self.kinds["all"]

    def bounds(self, kind: str) -> tuple[float, float]:
        """What to multiply a prediction by for its lower and upper bound, never on the same side of it."""
        found = self.of(kind)
        return min(found.low, 1.0), max(found.high, 1.0)


def kind_of(configuration: Configuration) -> str:
    """Configurations of one kind are predicted equally well, more or less: by what they divide, and their precision."""
    if configuration.pipeline > 1:
        divided = "pipeline"
    elif configuration.tensor > 1 or configuration.context > 1:
        divided = "tensor or context"
    else:
        divided = "data"
    return f"{divided}, {configuration.precision}"


def load_spread() -> Spread:
    """The figures that ship with refshard.

    Raises:
        SpecError: the file breaks its schema.
    """
    return convert(read_toml(resources.spread()), Spread, where="spread")
