"""The seam between the harness and whatever starts processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from refshard.specs import CaseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a launch ended. ``error`` is what the launcher itself can tell of a failure; the ranks may know better.

    ``log_tail`` holds the last lines that the rank which failed first wrote.
    """

    timed_out: bool = False
    error: str | None = None
    log_tail: tuple[str, ...] = ()


class Launcher(ABC):
    """Starts the ranks of one case, waits for them, and leaves no process behind."""

    @abstractmethod
    def launch(self, case: CaseSpec, folder: Path, on_progress: Callable[[str], None]) -> Launch:
        """Run ``python -m refshard.harness.worker folder`` on ``case.world_size`` ranks.

        ``on_progress`` is called now and then with what rank 0 is at. KeyboardInterrupt passes through, after the
        ranks have ended.
        """
