"""Fit a few constants of the profiles to published speeds that are marked for it, and print them.

    python profiles/published_runs/fit.py [--recordings runs/published_fit]

They are the published runs whose half is "fit". Each is recorded once, as ``refshard validate --fidelity dryrun``
records it; recordings are kept, and priced anew for other constants.

The fit makes the sum over the results of (log(predicted / published) / NOISE)^2 least, where large errors count less
(one run on a busy network says little of the machine), plus one term
(log(constant / said) / width)^2 for each constant: what its source says counts as one more observation. So a constant
about which the results say nothing stays where its source has it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from math import atan, exp, log
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from refshard.dryrun.collect import load, save
from refshard.dryrun.published import request_of, speed_of, why_not
from refshard.dryrun.request import Answer
from refshard.dryrun.run import DryRun, dry_run
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.published_run import PublishedRun, load_published_runs

NOISE = 0.05
"""Of a published speed, as a fraction: runs of one code on one kind of machine differ by about as much."""
Values = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number of a profile, by its path: what its source says, and within which factor exp(width) that is known."""

    path: str
    said: float
    width: float


MEASURED, ESTIMATED, UNKNOWN = 0.08, 0.15, 1.0
"""Widths of constants: Azure's products are within 8 % of the A100's law; nothing is known of some networks."""
CONSTANTS = {
    "torchtitan-h100": (
        # H100 SXM's 0.67, at 500 W in place of 700.
        Constant(path="hardware.matmul.bf16.efficiency", said=0.56, width=ESTIMATED),
        Constant(path="hardware.attention.bf16.efficiency", said=0.26, width=ESTIMATED),
        # What a copy reaches (BabelStream); torch's elementwise kernels also cast, broadcast and reduce.
        Constant(path="hardware.memory_bytes_per_s", said=2.1e12, width=ESTIMATED),
    ),
    # On the accelerator as its profile has it: what the network reaches that no pull request states.
    "torchtitan-2025": (Constant(path="between.bytes_per_s", said=320e9, width=UNKNOWN),),
    "dgx-a100": (
        Constant(path="hardware.matmul.bf16.efficiency", said=0.78, width=MEASURED),
        Constant(path="hardware.attention.bf16.efficiency", said=0.53, width=ESTIMATED),
        Constant(path="hardware.memory_bytes_per_s", said=1.65e12, width=ESTIMATED),
    ),
}


def with_constants(cluster: ClusterSpec, values: Values) -> ClusterSpec:
    """The cluster, its accelerator in it, with each value at its path."""
    tree = msgspec.to_builtins(msgspec.structs.replace(cluster, hardware=cluster.accelerator))
    for path, value in values.items():
        *folders, name = path.split(".")
        place = tree
        for folder in folders:
            place = place[folder]
        place[name] = value
    return msgspec.convert(tree, ClusterSpec)


def recorded(name: str, run: PublishedRun, folder: Path) -> None:
    """Record the run dry, unless the folder has it."""
    if (folder / f"{name}.json").exists():
        return
    found = dry_run(request_of(run))
    if found.answer.outcome != "stepped":
        raise SystemExit(f"{name}: the dry run did not take its steps: {found.answer.error}")
    save(found.recording, folder / f"{name}.npz")
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(found.answer))


@cache
def read(name: str, folder: Path) -> tuple[PublishedRun, DryRun]:
    """A published run and its recording."""
    run = load_published_runs()[name]
    answer = msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=Answer)
    return run, DryRun(request=request_of(run), answer=answer, recording=load(folder / f"{name}.npz"))


def error(name: str, folder: Path, values: Values) -> float:
    """Of the run's predicted speed with these constants, as a fraction."""
    run, found = read(name, folder)
    assert run.tokens_per_s_gpu is not None
    return speed_of(run, found, with_constants(load_cluster(run.cluster), values)) / run.tokens_per_s_gpu - 1


def fit(cluster: str, names: Sequence[str], errors: Callable[[Values], Sequence[float]]) -> None:
    """Fit one cluster's constants, and print them and the errors of the named results before and after."""
    constants = CONSTANTS[cluster]

    def values(logs: npt.NDArray[np.float64]) -> dict[str, float]:
        return {one.path: one.said * exp(x) for one, x in zip(constants, logs)}

    def residuals(logs: npt.NDArray[np.float64]) -> list[float]:
        of_results = [3 * atan(log(1 + each) / NOISE / 3) for each in errors(values(logs))]
        return of_results + [x / one.width for one, x in zip(constants, logs)]

    start = np.zeros(len(constants))
    # Parts of a rate end below 1, which is log(1 / said).
    most = [log(0.99 / one.said) if one.said < 1 else np.inf for one in constants]
    # A network that is hidden makes no difference, so what nothing is known of is also sought from far below.
    below = np.array([-2.0 if one.width == UNKNOWN else 0.0 for one in constants])
    solved = [
        least_squares(residuals, begin, bounds=(-np.inf, most), diff_step=0.02, xtol=2e-3, ftol=1e-3)
        for begin in ((start, below) if below.any() else (start,))
    ]
    found = min(solved, key=lambda one: float(one.cost)).x
    print(f"{cluster}, fitted on {len(names)} results:")
    for one, value in zip(constants, values(found).values()):
        print(f"  {one.path:<38} {value:<10.3g} (said: {one.said:.3g})")
    before, after = errors(values(start)), errors(values(found))
    for name, was, now in zip(names, before, after):
        print(f"  {name:<46} {was:+8.2%} -> {now:+.2%}")
    for label, left in (("as said", before), ("fitted", after)):
        print(f"  {label}: median error {median(map(abs, left)):.2%}, worst {max(map(abs, left)):.2%}", flush=True)


def fit_runs(folder: Path, pool: Executor) -> None:
    """The published runs, by their dry runs."""
    runs = {
        name: run for name, run in load_published_runs().items()
        if run.half == "fit" and run.tokens_per_s_gpu is not None and not why_not(run)
    }  # fmt: skip
    for name, run in runs.items():
        recorded(name, run, folder)
    for cluster in dict.fromkeys(run.cluster for run in runs.values()):
        names = [name for name, run in runs.items() if run.cluster == cluster]
        fit(
            cluster,
            names,
            lambda values, names=names: list(pool.map(partial(error, folder=folder, values=values), names)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=Path("runs/published_fit"))
    folder = parser.parse_args().recordings
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as pool:
        fit_runs(folder, pool)


if __name__ == "__main__":
    main()
