"""What a gate lets pass: rounds and limits for times, and for which metrics what change is a regression."""

from typing import Literal

import msgspec

from refshard.errors import nearest
from refshard.specs.reading import within

Direction = Literal["lower", "higher"]


FEWEST_ROUNDS = 6
"""From six rounds on there is a 95 % interval."""


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How times are compared, in two stages of paired rounds. Effects are relative: 0.01 is 1 %.

    ``screen_rounds`` single out suspects: cases with an estimated effect above ``screen_effect`` and a one-sided p
    below ``screen_p``. As many as ``confirm_rounds`` fresh ones decide: a suspect has regressed if Holm's procedure
    over all cases rejects at ``significance`` and the effect exceeds ``relevant``. A case passes only if an effect of
    ``visible`` is outside of its 95 % interval, of fresh rounds where that of the screening holds it; else the noise
    was too large to tell.
    """

    screen_rounds: int = 16
    screen_effect: float = 0.01
    screen_p: float = 0.25
    confirm_rounds: int = 48
    significance: float = 0.01
    relevant: float = 0.025
    visible: float = 0.05

    def __post_init__(self) -> None:
        for field in ("screen_rounds", "confirm_rounds"):
            within(field, getattr(self, field), FEWEST_ROUNDS, most=50)  # to 50 p-values are exact
        for field in ("screen_effect", "screen_p", "significance", "relevant", "visible"):
            if not 0 < (given := getattr(self, field)) < 1:
                raise ValueError(f"{field} must lie between 0 and 1, got {given}")
        if not self.screen_effect <= self.relevant < self.visible:
            raise ValueError(
                f"screen_effect, relevant and visible must ascend, got {self.screen_effect}, {self.relevant} and "
                f"{self.visible}"
            )


class MetricRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an exact metric has changed: by more than ``tolerance`` of what it was. ``better`` is the direction of
    improvement; None if every change needs a reason. A metric that does not gate is only reported.
    """

    better: Direction | None = None
    tolerance: float = 0.0
    gates: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {self.tolerance}")


RULES: dict[str, MetricRule] = {
    "count": MetricRule(better="lower"),
    "bytes": MetricRule(better="lower"),
    "operators": MetricRule(better="lower"),
    "allocations": MetricRule(better="lower"),
    "allocated memory": MetricRule(better="lower"),
    "peak memory": MetricRule(better="lower", tolerance=0.05),
    "peak allocated": MetricRule(better="lower"),
    "peak active": MetricRule(better="lower"),
    "peak reserved": MetricRule(better="lower"),
    "stream waits": MetricRule(better="lower"),
    "host synchronisations": MetricRule(better="lower"),
    "time": MetricRule(better="lower", tolerance=0.01),
    "fits": MetricRule(better="higher"),
}
"""Rules by metric, or by the last word of its name; any other metric must stay as it is."""
UNRULED = ("FLOPs per token", "operator order", "last loss", "losses", "parameters")
"""The metrics that have no better direction."""


class GateSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A suite's table ``gate``: limits for times, and rules for exact metrics in addition to :data:`RULES`."""

    times: TimeLimits = TimeLimits()
    metrics: dict[str, MetricRule] = {}

    def __post_init__(self) -> None:
        known = [*(name for name in RULES if name not in ("count", "bytes")), *UNRULED]
        for name in self.metrics:
            if name not in known and not name.endswith(("count", "bytes")):
                raise ValueError(
                    f"metrics: unknown '{name}'; {nearest(name, known)}, or a name that ends in count or bytes"
                )

    @property
    def rules(self) -> dict[str, MetricRule]:
        """The rule of every metric that has one."""
        return {**RULES, **self.metrics}
