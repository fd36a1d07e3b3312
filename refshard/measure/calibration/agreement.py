"""What all ranks of a calibration agree on, at the store where they met: it takes neither a collective nor memory."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from refshard.measure.calibration.samples import ELSEWHERE
from refshard.measure.rank import describe

T = TypeVar("T")
_PATIENCE = timedelta(minutes=10)
"""How much longer one rank may take than another."""


class FailedOnSomeRankError(Exception):
    """Raised on all ranks, which go on together; the message says why on the rank that failed."""


class Agreement:
    """Each rank has one, and all of them must call it in the same order."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._store, self._ranks, self._turn = store, ranks, 0

    def all_well(self, *, well: bool = True) -> bool:
        """Wait for all ranks to come here, and return whether all of them are ``well``."""
        turn, self._turn = f"turn/{self._turn}", self._turn + 1
        if not well:
            self._store.add(f"{turn}/unwell", 1)
        if self._store.add(f"{turn}/arrived", 1) == self._ranks:
            self._store.set(f"{turn}/go", "")
        else:
            self._store.wait([f"{turn}/go"], _PATIENCE)
        return self._store.add(f"{turn}/unwell", 0) == 0

    def made_by_all(self, what: str, make: Callable[[], T]) -> T:
        """What ``make`` makes for ``what``, once all ranks have made theirs.

        Raises:
            FailedOnSomeRankError: a rank could not.
        """
        failure = ""
        try:
            made = make()
        except Exception as error:
            failure = f"{what}: {describe(error)}"
        if not self.all_well(well=not failure):
            raise FailedOnSomeRankError(failure or ELSEWHERE)
        return made
