"""Many dry runs of one command: all combinations of choices, and the largest number that fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from refshard.dryrun.trials import Laboratory, Prediction, Trial
from refshard.errors import SpecError

MOST = 2**20
"""A search gives up above this many steps: its number does not change memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination: its ``choices`` by the name of their option, its trial, and what that found."""

    choices: Mapping[str, str]
    trial: Trial
    tried: Prediction

    @property
    def total_tokens_per_s(self) -> float | None:
        """Tokens per second of all GPUs."""
        each = self.tried.tokens_per_s
        return None if each is None else each * self.trial.request.world_size


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows that fit and that no other beats in both tokens/s/GPU and memory, the fastest first."""
    kept: list[Row] = []
    for row in ranked(rows):
        if not kept or row.tried.reserved_bytes < kept[-1].tried.reserved_bytes:
            kept.append(row)
    return kept


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The rows that fit and whose speed is known: most tokens/s/GPU first, then least memory."""
    known = [row for row in rows if row.tried.fits and row.tried.tokens_per_s]
    return sorted(known, key=lambda row: (-(row.tried.tokens_per_s or 0), row.tried.reserved_bytes))


def largest(
    laboratory: Laboratory, trial_of: Callable[[int], Trial], step: int, known: Mapping[int, Prediction] = {}
) -> dict[int, Prediction]:
    """What was tried to find the largest multiple of ``step`` that fits, by number; ``known`` was tried before.

    Two numbers at a time. The next are where a straight line through the memory of those around meets the limit, so
    that memory which grows evenly needs two rounds.

    Raises:
        SpecError: the number does not change memory.
    """
    tried = {number // step: one for number, one in known.items()}

    def ask(*numbers: int) -> None:
        wanted = [n for n in dict.fromkeys(numbers) if n not in tried]
        tried.update(zip(wanted, laboratory.try_all([trial_of(n * step) for n in wanted])))

    ask(1, 2)
    while True:
        fitting = max((n for n, one in tried.items() if one.fits), default=0)
        above = min((n for n, one in tried.items() if n > fitting), default=None)
        if above == fitting + 1:
            return {n * step: one for n, one in sorted(tried.items())}
        if fitting > MOST:
            raise SpecError(f"--largest: memory does not grow with the number: {fitting * step:,} still fits")
        guess = _where_it_ends(tried, fitting, above)
        ask(guess, guess + 1 if above is None or guess + 1 < above else guess - 1 if guess - 1 > fitting else guess)


def _where_it_ends(tried: Mapping[int, Prediction], fitting: int, above: int | None) -> int:
    """Where memory probably exceeds what is usable, between the largest that fits and the smallest that does not."""
    if fitting == 0:
        assert above is not None
        return max(1, above // 2)
    other = above if above is not None else max((n for n in tried if n < fitting), default=fitting)
    grown = tried[other].reserved_bytes - tried[fitting].reserved_bytes
    each = grown / (other - fitting) if other != fitting and tried[other].reserved_bytes else 0.0
    most = 16 * fitting if above is None else above - 1
    if each <= 0:
        return 2 * fitting if above is None else (fitting + above) // 2
    room = tried[fitting].usable_bytes - tried[fitting].reserved_bytes
    return min(max(fitting + int(room / each), fitting + 1), most)
