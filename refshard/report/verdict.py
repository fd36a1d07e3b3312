"""The sentence that decides, for runs, sweeps and plans alike."""

from refshard.quantities import format_bytes, format_percent
from refshard.specs.choice import EQUAL_MEMORY

SAME_SPEED = " at the same speed"
TIMES = 2
"""Ratio from which "2.3 times as long" reads better than "130 % longer"."""


def use(name: str, other: str, sizes: tuple[float, float] | None, ratio: float | None, speed: str = SAME_SPEED) -> str:
    """Which of two to use, and why. ``sizes`` are the memory of both, B; ``ratio`` is the other's step time over this
    one's, None if it is not slower: then ``speed`` says how their times compare.

    >>> use("yafsdp", "fsdp2", (45 << 30, 51 << 30), None)
    'Use yafsdp: 6.00 GiB (12 %) less memory than fsdp2 at the same speed.'
    >>> use("yafsdp", "fsdp2", (45 << 30, 51 << 30), 1.048)
    'Use yafsdp: 6.00 GiB (12 %) less memory than fsdp2, which takes 4.8 % longer.'
    >>> use("ddp", "fsdp2", (51 << 30, 45 << 30), 2.3)
    'Use ddp: fsdp2 takes 2.3 times as long, in 6.00 GiB (12 %) less memory.'
    >>> use("fsdp2", "yafsdp", (45 << 30, 45 << 30), None)
    'Use fsdp2: no other is clearly faster or needs clearly less memory.'
    """
    mine, its = sizes or (0, 0)
    difference = abs(its - mine)
    less = f"{format_bytes(difference)} ({format_percent(difference / max(mine, its, 1), 0)}) less memory"
    if its > mine * (1 + EQUAL_MEMORY):
        return f"Use {name}: {less} than {other}{f', which takes {longer(ratio)}' if ratio else speed}."
    if ratio is None:
        return f"Use {name}: no other is clearly faster or needs clearly less memory."
    memory = f", in {less}" if mine > its * (1 + EQUAL_MEMORY) else ", in as much memory" if sizes else ""
    return f"Use {name}: {other} takes {longer(ratio)}{memory}."


def longer(ratio: float) -> str:
    """How much longer a step takes.

    >>> longer(1.048), longer(2.3), longer(0.9)
    ('4.8 % longer', '2.3 times as long', '10.0 % less')
    """
    if ratio >= TIMES:
        return f"{ratio:.1f} times as long"
    return f"{format_percent(abs(ratio - 1))} {'longer' if ratio >= 1 else 'less'}"
