"""Two cases' step times set beside each other, once per page."""

from functools import lru_cache

from refshard.analysis.cases import Case
from refshard.specs.case import REPEATING
from refshard.stats.compare import Comparison, compare


@lru_cache(maxsize=2**14)
def compared(a: Case, b: Case) -> Comparison | None:
    """Step time of ``b`` over that of ``a``; None where either has no samples, or its times are calculated.

    What is calculated takes the same time always: its samples are none. Rounds of two runs are not interleaved.
    """
    if not (a.samples and b.samples) or REPEATING & {a.fidelity, b.fidelity}:
        return None
    return compare(a.samples, b.samples, interleaved=a.header is b.header)
