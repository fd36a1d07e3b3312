"""``refshard validate``: predictions beside what was measured or published."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from refshard.commands.folders import find_run
from refshard.commands.printing import tell
from refshard.dryrun.published import Prediction
from refshard.dryrun.published import predict as predict_by_dry_run
from refshard.dryrun.recorded import recorded_cases
from refshard.errors import SpecError
from refshard.estimate.claims import predicted_claims
from refshard.estimate.published import load_runs, predicted
from refshard.report.blocks import Answer
from refshard.report.dryrun.validation import dryrun_validation_answer
from refshard.report.plan.published import Compared, published_answer
from refshard.specs.published_parallel import load_parallel, read_parallel
from refshard.specs.published_run import PublishedRun, load_published_runs

_AT_ONCE = min(4, os.cpu_count() or 1)
"""Dry runs at a time: each takes one core and about half a GiB of memory."""


def validate(
    run: Path | None, *, fidelity: str = "plan", only: str | None = None, published: Path | None = None
) -> Answer:
    """Predictions beside the measured cases of a run, or without one beside every published table and claim.

    ``published`` is a table of one's own, instead of those that ship. With the fidelity "dryrun", published runs beside
    dry runs, of those whose names hold ``only``; without it, also the recorded cases of real GPUs.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: the run holds no case that was both measured and predicted, or another value is wrong.
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
    if fidelity == "dryrun":
        return _by_dry_runs(run, only)
    if only is not None:
        raise SpecError(f"only: selects published runs to dry-run, got fidelity {fidelity}; add --fidelity dryrun")
    if run is not None and published is not None:
        raise SpecError(f"published: compares a table, but a run is given too: {run}; leave out one of them")
    if run is not None:
        return _of_run(run)
    tables = load_parallel() if published is None else {published.stem: read_parallel(published)}
    runs, left = load_runs(tables)
    if not runs:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in left))
        raise SpecError(f"published: no run of {published} can be predicted: {reasons}; complete the table")
    found = [
        Compared(published=one, seconds=seconds, allocated_gib=peak)
        for one, (seconds, peak) in zip(runs, predicted(runs))
    ]
    return published_answer(found, left, predicted_claims() if published is None else ())


def _by_dry_runs(run: Path | None, only: str | None) -> Answer:
    if run is not None:
        raise SpecError(f"fidelity dryrun predicts published runs, but a run is given: {run}; leave out one of them")
    chosen = {name: one for name, one in load_published_runs().items() if only is None or only in name}
    if not chosen:
        raise SpecError(
            f"only: no published run's name holds '{only}'; choose from: {', '.join(load_published_runs())}"
        )

    def predicted(place: int, name: str, one: PublishedRun) -> Prediction:
        tell(f"refshard: {place} of {len(chosen)}: {name}")
        return predict_by_dry_run(name, one)

    with ThreadPoolExecutor(_AT_ONCE) as pool:  # each dry run is a process of its own
        found = list(pool.map(predicted, range(1, len(chosen) + 1), chosen, chosen.values()))
    return dryrun_validation_answer(found, recorded_cases() if only is None else ())


def _of_run(folder: Path) -> Answer:
    from refshard.analysis.evidence import gather
    from refshard.analysis.validation import validated
    from refshard.harness.dry.first import folder_of_dry_runs
    from refshard.harness.store import holds_run, read_run  # these bring torch and pandas
    from refshard.report.run.validation import validation_answer

    dry = folder_of_dry_runs(folder)
    pairs = validated(gather(*([read_run(dry)] if holds_run(dry) else []), read_run(find_run(folder))))
    if not pairs:
        raise SpecError(
            f"{folder}: holds no case that was both measured and predicted; run a suite with fidelity = ['measured', "
            "'emulated'], or with dry_run_first = true"
        )
    return validation_answer(pairs)
