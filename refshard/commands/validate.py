"""``refshard validate``: predictions against measured or published results."""

import importlib.util
from pathlib import Path

from refshard import resources
from refshard.commands.folders import find_run
from refshard.errors import SpecError
from refshard.report.blocks import Answer


def validate(
    run: Path | None, *, fidelity: str = "plan", only: str | None = None, published: Path | None = None
) -> Answer:
    """Predictions against the measured cases of a run, or without one against every published run and claim.

    ``published`` is a table of one's own, instead of the checkout's. With the fidelity "dryrun", published runs against
    dry runs, only runs with ``only`` in their name; without it, also the recorded cases of real GPUs.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: the run holds no case that was both measured and predicted, refshard was installed from a wheel,
            which has no published results, or another value is wrong.
        RefshardError: the fake device cannot be made.
    """
    if fidelity not in ("plan", "dryrun"):
        remedy = "now --fidelity plan" if fidelity == "simulated" else "choose one of them"
        raise SpecError(f"fidelity must be plan or dryrun, got '{fidelity}'; {remedy}")
    if fidelity == "dryrun" and published is not None:
        raise SpecError(
            f"published: tables are predicted in closed form, got fidelity dryrun and {published}; leave out one of "
            "them"
        )
    if fidelity == "dryrun" and run is not None:
        raise SpecError(f"fidelity dryrun predicts published runs, but a run is given: {run}; leave out one of them")
    if fidelity != "dryrun" and only is not None:
        raise SpecError(f"only: selects published runs to dry-run, got fidelity {fidelity}; add --fidelity dryrun")
    if run is not None and published is not None:
        raise SpecError(f"published: compares a table, but a run is given too: {run}; leave out one of them")
    if run is not None:
        return _of_run(run)
    # Another package may have that name where refshard was installed from a wheel.
    found = importlib.util.find_spec("validation")
    if found is None or found.origin != str(resources.root() / "validation" / "__init__.py"):
        raise SpecError(
            "published results are part of a checkout, got a refshard without one; run `refshard validate` from a "
            "clone of the repository, or give the folder of a run"
        )
    answer: Answer = importlib.import_module("validation.report").answer(
        fidelity=fidelity, only=only, published=published
    )
    return answer


def _of_run(folder: Path) -> Answer:
    from refshard.analysis.evidence import gather
    from refshard.analysis.validation import validated
    from refshard.measure.dry.first import folder_of_dry_runs
    from refshard.measure.store import holds_run, read_run  # these bring torch and pandas
    from refshard.report.run.predictions import validation_answer

    dry = folder_of_dry_runs(folder)
    every = validated(gather(*([read_run(dry)] if holds_run(dry) else []), read_run(find_run(folder))))
    pairs = [pair for pair in every if pair.ok]
    if not pairs:
        raise SpecError(
            f"{folder}: holds no case that was both measured and predicted; run a suite with fidelity = ['measured', "
            "'emulated'], or with dry_run_first = true"
        )
    return validation_answer(pairs)
