"""``refshard report``: draw a run's dashboard."""

from pathlib import Path

from refshard.errors import SpecError
from refshard.harness.store import read_run
from refshard.report.render import write_dashboard


def report(run: Path, output: Path | None) -> Path:
    """Draw the run in the folder ``run`` to ``output``, or to ``dashboard.html`` in that folder; return the path.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: ``output`` cannot be written.
    """
    target = output or run / "dashboard.html"
    finished = read_run(run)
    try:
        write_dashboard(finished, target)
    except OSError as error:
        raise SpecError(
            f"out: {target} cannot be written ({error.strerror}); let `refshard report --out` name a file that can"
        ) from None
    return target
