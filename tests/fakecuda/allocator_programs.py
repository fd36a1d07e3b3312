"""Random programs for an allocator: what they are made of, and the settings that they run under."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hypothesis import strategies as st

MIB = 1 << 20
NO_LIMIT = 1 << 62
STREAMS = 3


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """As in ``PYTORCH_ALLOC_CONF``; ``divisions`` are the same for all sizes."""

    expandable: bool = False
    large_segment: int = 20 * MIB
    max_split: int = NO_LIMIT
    max_rounding: int = 20 * MIB
    threshold: float = 0.0
    fraction: float = 1.0
    divisions: int = 0
    rejects: bool = False

    def text(self) -> str:
        """The same as ``PYTORCH_ALLOC_CONF`` has it."""
        options = [f"expandable_segments:{self.expandable}", f"large_segment_size_mb:{self.large_segment // MIB}"]
        options += [f"max_non_split_rounding_mb:{self.max_rounding // MIB}", f"throw_on_cudamalloc_oom:{self.rejects}"]
        options += [f"max_split_size_mb:{self.max_split // MIB}"] if self.max_split < NO_LIMIT else []
        options += [f"garbage_collection_threshold:{self.threshold}"] if self.threshold else []
        options += [f"per_process_memory_fraction:{self.fraction}"] if self.fraction < 1 else []
        options += [f"roundup_power2_divisions:{self.divisions}"] if self.divisions else []
        return ",".join(options)


class Step(NamedTuple):
    """One call. ``pick`` says which of the blocks that are held, ``size`` is in bytes."""

    action: Literal["allocate", "free", "record", "launch", "advance", "empty_cache"]
    size: int = 0
    pick: int = 0
    stream: int = 0


def _settings(large_segment: int, **given: object) -> ModelSettings:
    return ModelSettings(large_segment=large_segment, max_rounding=large_segment, **given)  # type: ignore[arg-type]


settings = st.builds(
    _settings,
    large_segment=st.sampled_from([20 * MIB, 20 * MIB, 12 * MIB, 40 * MIB]),
    expandable=st.booleans(),
    max_split=st.sampled_from([NO_LIMIT, NO_LIMIT, 40 * MIB, 64 * MIB]),
    threshold=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
    fraction=st.sampled_from([1.0, 1.0, 0.5, 0.9]),
    divisions=st.sampled_from([0, 0, 4, 8, 64]),
    rejects=st.sampled_from([False, False, False, True]),
)
capacities = st.sampled_from([60 * MIB, 150 * MIB, 400 * MIB, 1000 * MIB])

_EDGES = [1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 20 * MIB, 40 * MIB, 41 * MIB]
sizes = st.one_of(
    st.sampled_from(_EDGES),
    st.integers(1, MIB),
    st.integers(MIB, 10 * MIB),
    st.integers(10 * MIB, 60 * MIB),
    st.sampled_from([3 * MIB, 12 * MIB, 30 * MIB, 64 * MIB]),
)
_streams = st.sampled_from([0, 0, 0, 1, 2])
_picks = st.integers(0, 50)
_frees = st.builds(Step, st.just("free"), pick=_picks)
_others = st.builds(
    Step, st.sampled_from(["record", "launch", "advance", "advance", "record", "empty_cache"]),
    pick=_picks, stream=_streams,
)  # fmt: skip


def _programs(own_sizes: list[int]) -> st.SearchStrategy[list[Step]]:
    allocations = st.builds(Step, st.just("allocate"), size=st.sampled_from(own_sizes), stream=_streams)
    return st.lists(st.one_of(allocations, allocations, allocations, _frees, _frees, _others), min_size=30, max_size=60)


programs = st.lists(sizes, min_size=3, max_size=8).flatmap(_programs)
"""Programs that use a few sizes again and again, as training steps do."""
