"""Fit a few constants of the profiles to the published runs that are marked for it; print both halves.

    python -m validation.fit [--experts | --write-spread] [--dry-runs FOLDER]

Closed forms are fitted by default, to runs of dense models; with ``--experts`` the constants of mixtures of experts, to
runs of these, while all other constants stay. Runs that differ only in their number of GPUs, their release or their
file are one *setting*. For each source and accelerator, every other setting is fitted, in the order of the file, and
the others are held out. Each setting counts once, however many runs it has.

The fit minimises the sum over the fitted settings of log(predicted / published)^2 / NOISE^2, with large errors counted
less (a run whose source leaves something out says little), plus one term (log(constant / said) / width)^2 for each
constant: what its source says counts as one more observation. So a constant about which the results say nothing stays
where its source has it.

``--write-spread`` leaves the constants as they are, and writes the errors by kind of configuration to
``profiles/spread.toml``, from which plans take their error bars.

``--dry-runs`` fits the constants of dry runs instead, one machine at a time, to the speed of the runs with a script.
Each is recorded once in FOLDER, as ``refshard validate --fidelity dryrun`` records it, and priced anew for other
constants.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from refshard import resources
from refshard.dryrun.recording import load, save
from refshard.dryrun.request import Answer
from refshard.dryrun.run import DryRun, dry_run
from refshard.folders import replace_file
from refshard.plan import collectives, kernels, layers
from refshard.plan.plan import LEAST_RUNS, kind_of
from refshard.specs.cluster import ClusterSpec, load_cluster
from validation.closed_form import Published, load_runs, predicted
from validation.dry_runs import request_of, speed_of, why_not
from validation.schema import HALVES, Half, scripted_runs

NOISE = 0.05
"""Of a published step time or speed, as a fraction: runs of one code on one kind of machine differ by about as much."""
Values = Mapping[str, float]
Logs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    """One number of a cluster's profile, or of its hardware's, by its path; what its source says, and within which
    factor exp(width) that is known.
    """

    path: str
    said: float
    width: float


MEASURED, ESTIMATED, UNKNOWN = 0.08, 0.2, 1.0
_BF16, _FP8 = "hardware.matmul.bf16.efficiency", "hardware.matmul.fp8.efficiency"
_MXFP8, _NVFP4 = "hardware.matmul.mxfp8.efficiency", "hardware.matmul.nvfp4.efficiency"
_AVERAGE_BF16 = "hardware.closed_forms.bf16_efficiency"
_ATTENTION, _AVERAGE_MEMORY = "hardware.attention.bf16.efficiency", "hardware.closed_forms.memory_bytes_per_s"
_CUDNN, _TRITON = "hardware.attention_kernels.cudnn", "hardware.attention_kernels.triton"
_NETWORK, _MEMORY = "between.bytes_per_s", "hardware.memory_bytes_per_s"
CLOSED_FORMS = {
    "dgx-h100": (
        Constant(_AVERAGE_BF16, 0.67, ESTIMATED), Constant(_FP8, 0.67, ESTIMATED), Constant(_ATTENTION, 0.33, MEASURED),
        Constant(_CUDNN, 1.55, MEASURED), Constant(_TRITON, 0.6, UNKNOWN),
        Constant(_AVERAGE_MEMORY, 2.93e12, ESTIMATED),
    ),
    "dgx-a100": (Constant(_TRITON, 0.6, UNKNOWN),),
    "dgx-a100-40gb": (Constant(_TRITON, 0.6, UNKNOWN), Constant(_BF16, 0.70, ESTIMATED)),
    # DGX A100's; the adapters of this cluster are not published.
    "yafsdp-a100": (Constant(_NETWORK, 185e9, UNKNOWN),),
    # One adapter of 400 Gbit/s for each GPU, at 80 %.
    "torchtitan-h100": (Constant(_FP8, 0.5, ESTIMATED), Constant(_NETWORK, 320e9, ESTIMATED)),
    "hgx-h200": (Constant(_FP8, 0.67, ESTIMATED), Constant(_AVERAGE_BF16, 0.67, ESTIMATED)),
    "simumax-b200": (
        Constant(_BF16, 0.488, MEASURED), Constant(_ATTENTION, 0.35, ESTIMATED),
        Constant("hardware.kernel_s", 30e-6, ESTIMATED),
    ),
    "hgx-b200": (Constant(_FP8, 0.57, ESTIMATED), Constant(_MXFP8, 0.57, ESTIMATED)),
    "gb200-nvl72": (
        Constant(_BF16, 0.64, ESTIMATED), Constant(_FP8, 0.57, ESTIMATED), Constant(_CUDNN, 1.55, ESTIMATED),
        Constant(_MXFP8, 0.57, ESTIMATED), Constant(_NVFP4, 0.5, UNKNOWN),
    ),
    "gb300-nvl72": (
        Constant(_FP8, 0.57, ESTIMATED), Constant(_CUDNN, 1.55, ESTIMATED), Constant(_MXFP8, 0.57, ESTIMATED),
        Constant(_NVFP4, 0.5, UNKNOWN),
    ),
}  # fmt: skip
"""By cluster. Clusters with the hardware of another take its constants (:data:`SHARES`)."""
SHARES = {"h100-roce": "dgx-h100", "kempner-h200": "hgx-h200"}
EVERYWHERE = (
    Constant("EAGER_PART", 0.8, ESTIMATED),
    Constant("RING_PART", 0.8, ESTIMATED),
    Constant("QUANTISED_BYTES", 4.0, UNKNOWN),
    Constant("SKEW", 1.0, UNKNOWN),
    Constant("straggling", 0.004, UNKNOWN),
)
"""Constants of the closed forms, and of all clusters alike."""
EXPERTS = (
    Constant("ROUTER_KERNELS", 30.0, UNKNOWN), Constant("EXPERT_KERNELS", 20.0, UNKNOWN),
    Constant("EACH_EXPERT", 2.0, UNKNOWN), Constant("OVERLAP_KERNELS", 50.0, UNKNOWN),
    Constant("GROUPED_TILE_S", 1e-6, UNKNOWN),
)  # fmt: skip
"""Constants of mixtures of experts, on all clusters alike."""
MODULES: dict[str, Any] = {
    "EAGER_PART": layers, "RING_PART": layers, "QUANTISED_BYTES": kernels, "SKEW": collectives,
    "ROUTER_KERNELS": layers, "EXPERT_KERNELS": layers, "EACH_EXPERT": layers,
    "OVERLAP_KERNELS": layers, "GROUPED_TILE_S": layers,
}  # fmt: skip
"""Where the closed forms hold theirs."""
DRY_RUNS = {
    # H100 SXM's 0.67, at 500 W in place of 700. Memory: what a copy reaches (BabelStream); torch's elementwise kernels
    # also cast, broadcast and reduce.
    "torchtitan-h100": (Constant(_BF16, 0.56, 0.15), Constant(_ATTENTION, 0.26, 0.15), Constant(_MEMORY, 2.1e12, 0.15)),
    # On the accelerator as its profile has it: the rate of the network, which no pull request states.
    "torchtitan-2025": (Constant(_NETWORK, 320e9, UNKNOWN),),
    # Azure's products are within 8 % of the A100's law.
    "dgx-a100": (Constant(_BF16, 0.78, MEASURED), Constant(_ATTENTION, 0.53, 0.15), Constant(_MEMORY, 1.65e12, 0.15)),
}


def with_constants(cluster: ClusterSpec, values: Values) -> ClusterSpec:
    """The cluster, its accelerator in it, with each value at its path."""
    tree = msgspec.to_builtins(msgspec.structs.replace(cluster, hardware=cluster.accelerator))
    for path, value in values.items():
        owner, names = tree, path.split(".")
        if names[0] == "hardware":
            owner, names = tree["hardware"], names[1:]
        owner["sources"].setdefault(names[0], "fitted")
        for folder in names[:-1]:
            owner[folder] = owner.get(folder) or {}
            owner = owner[folder]
        owner[names[-1]] = value
    return msgspec.convert(tree, ClusterSpec)


def solve(constants: Sequence[Constant], residuals: Callable[[Logs], Logs], starts: Sequence[float] = (0.0,)) -> Logs:
    """Logarithms of the constants over what their sources say; unknown ones begin at each of ``starts``."""
    # A fraction of a rate stays below 1, which is log(1 / said).
    most = [log(0.99 / one.said) if one.said < 1 else np.inf for one in constants]
    widths = np.array([one.width for one in constants])

    def with_sources(logs: Logs) -> Logs:
        return np.concatenate([residuals(logs), logs / widths])

    solved = [
        least_squares(
            with_sources, np.where(widths == UNKNOWN, start, 0.0), bounds=(-np.inf, most),
            diff_step=np.full(len(widths), 0.02), xtol=1e-3, ftol=1e-3,
        )
        for start in starts
    ]  # fmt: skip
    found: Logs = min(solved, key=lambda one: float(one.cost)).x
    return found


def bounded(logs: Logs) -> Logs:
    """Errors in units of their noise, large ones counted less."""
    return 3 * np.arctan(logs / NOISE / 3)


def valued(constants: Iterable[Constant], logs: Logs) -> dict[str, float]:
    """Each constant's value by its path."""
    return {one.path: one.said * exp(x) for one, x in zip(constants, logs)}


class ClosedForms:
    """The runs, by the cluster that their constants belong to; ``fitted`` are constants of all clusters, ``own`` says
    whether those of each cluster are fitted, too.
    """

    def __init__(self, runs: Sequence[Published], fitted: Sequence[Constant] = (), *, own: bool = False) -> None:
        self.of: dict[str, list[Published]] = defaultdict(list)
        for run in runs:
            self.of[SHARES.get(run.job.cluster, run.job.cluster)].append(run)
        self.free: list[tuple[str, Constant]] = [("", one) for one in fitted]
        self.free += [(name, one) for name in self.of for one in CLOSED_FORMS.get(name, ()) if own]
        self._known: dict[tuple[object, ...], Logs] = {}

    def errors(self, logs: Logs) -> dict[str, Logs]:
        """log(predicted / published) of each cluster's runs."""
        return {name: self._errors(name, logs) for name in self.of}

    def _errors(self, name: str, logs: Logs) -> Logs:
        mine = [(one, x) for (owner, one), x in zip(self.free, logs) if owner in ("", name)]
        values = valued([one for one, _ in mine], np.array([x for _, x in mine]))
        key = (name, *values.values())
        if key not in self._known:
            for constant, module in MODULES.items():
                setattr(module, constant, values.pop(constant, getattr(module, constant)))
            clusters = {id(run.cluster): with_constants(run.cluster, values) for run in self.of[name]}
            runs = [replace(run, cluster=clusters[id(run.cluster)]) for run in self.of[name]]
            self._known[key] = np.array([log(one.seconds / one.published.seconds) for one in predicted(runs)])
        return self._known[key]

    def residuals(self, logs: Logs) -> Logs:
        """Errors of the fitted settings, each of which counts once."""
        parts = []
        for name, errors in self.errors(logs).items():
            runs = self.of[name]
            counts = Counter(run.setting for run in runs)
            weights = [(run.half == "fit") / counts[run.setting] ** 0.5 for run in runs]
            parts.append(bounded(errors) * weights)
        return np.concatenate(parts)

    def report(self, logs: Logs) -> list[tuple[Published, float]]:
        """Print constants and errors; return the runs and their errors as fractions."""
        for (owner, one), x in zip(self.free, logs):
            print(f"{owner or 'all clusters':<16} {one.path:<36} {one.said * exp(x):<10.4g} (said: {one.said:.4g})")
        pairs = {
            name: [(run, exp(error) - 1) for run, error in zip(self.of[name], errors)]
            for name, errors in self.errors(logs).items()
        }
        pairs["all"] = [pair for some in list(pairs.values()) for pair in some]
        for name, some in pairs.items():
            for half in HALVES:
                if errors := [error for run, error in some if run.half == half]:
                    sizes = sorted(map(abs, errors))
                    print(
                        f"{name:<16} {half:<9} {len(sizes):3d} runs, median error {median(sizes):.1%}, 90th percentile "
                        f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}, worst {sizes[-1]:.1%}, bias {median(errors):+.1%}",
                        flush=True,
                    )
        return pairs["all"]


def weighted(sources: Iterable[Logs], part: float) -> float:
    """The quantile ``part`` of the sources' figures, where each source counts the same."""
    some = list(sources)
    weights = np.concatenate([np.full(len(one), 1 / len(one)) for one in some])
    return float(np.quantile(np.concatenate(some), part, weights=weights, method="inverted_cdf"))


def spread_text(pairs: Sequence[tuple[Published, float]]) -> str:
    """The errors by kind, as TOML: of each source those of its held-out runs, or of the fitted ones if it has no other.

    Each source counts the same: its runs share software and machine, so that they lie close together. ``within`` is the
    median error without each source's own, of sources with at least :data:`LEAST_RUNS` runs. ``count`` is of held-out
    runs; kinds without any are left out.
    """
    kinds: dict[str, dict[str, dict[Half, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for run, error in pairs:
        kinds[kind_of(run.job, run.model, run.cluster.accelerator)][run.table][run.half].append(error)
    lines = ["# Written by python -m validation.fit --write-spread."]
    for kind, sources in sorted(kinds.items()):
        if not (count := sum(len(halves["held out"]) for halves in sources.values())):
            continue
        chosen = [np.array(halves["held out"] or halves["fit"]) for halves in sources.values()]
        middle = weighted((abs(one) for one in chosen), 0.5)
        within = [abs((1 + some) / (1 + median(some)) - 1) for some in chosen if len(some) >= LEAST_RUNS]
        low, high = (weighted((1 / (1 + some) for some in chosen), part) for part in (0.1, 0.9))
        lines += [
            "", f'[kinds."{kind}"]', f"count = {count}", f"sources = {len(chosen)}", f"median = {middle:.4f}",
            f"within = {weighted(within, 0.5) if within else middle:.4f}", f"low = {low:.4f}", f"high = {high:.4f}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


@cache
def recording(name: str, folder: Path) -> DryRun:
    """The dry run of a published run, from the folder or recorded there."""
    request, answers, arrays = request_of(scripted_runs()[name]), folder / f"{name}.json", folder / f"{name}.npz"
    if not answers.is_file():
        found = dry_run(request, also_at_worst=False)
        if found.answer.outcome != "stepped":
            raise SystemExit(f"{name}: the dry run did not take its steps: {found.answer.error}")
        save(found.recording, arrays)
        answers.write_bytes(msgspec.json.encode(found.answer))
    answer = msgspec.json.decode(answers.read_bytes(), type=Answer)
    return DryRun(request=request, answer=answer, recording=load(arrays))


def speed_error(name: str, folder: Path, values: Values) -> float:
    """Error of the run's predicted speed with these constants, as a fraction."""
    one = scripted_runs()[name]
    cluster = with_constants(load_cluster(one.cluster), values)
    return speed_of(one, recording(name, folder), cluster) / (one.run.tokens_per_s_gpu or 1) - 1


def fit_dry_runs(folder: Path, pool: Executor) -> None:
    """Print each machine's constants and the errors of its fitted runs before and after."""
    by_cluster: dict[str, list[str]] = defaultdict(list)
    for name, one in scripted_runs().items():
        if one.half == "fit" and one.run.tokens_per_s_gpu is not None and not why_not(one):
            recording(name, folder)
            by_cluster[one.cluster].append(name)
    for cluster, names in by_cluster.items():
        constants = DRY_RUNS[cluster]

        def errors(logs: Logs, names: list[str] = names, constants: tuple[Constant, ...] = constants) -> list[float]:
            return list(pool.map(partial(speed_error, folder=folder, values=valued(constants, logs)), names))

        # A network that is hidden makes no difference, so an unknown one is also sought from far below.
        starts = (0.0, -2.0) if any(one.width == UNKNOWN for one in constants) else (0.0,)
        found = solve(constants, lambda logs, errors=errors: bounded(np.log1p(errors(logs))), starts)  # type: ignore[misc]
        print(f"{cluster}, fitted on {len(names)} results:")
        for constant, value in zip(constants, valued(constants, found).values()):
            print(f"  {constant.path:<38} {value:<10.3g} (said: {constant.said:.3g})")
        before, after = errors(np.zeros(len(constants))), errors(found)
        for name, was, now in zip(names, before, after):
            print(f"  {name:<46} {was:+8.2%} -> {now:+.2%}")
        for label, some in (("as said", before), ("fitted", after)):
            print(f"  {label}: median error {median(map(abs, some)):.2%}, worst {max(map(abs, some)):.2%}", flush=True)


def main() -> None:
    """Fit, or write the spread of the profiles as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-spread", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--dry-runs", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.dry_runs:
        options.dry_runs.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(2) as pool:
            fit_dry_runs(options.dry_runs, pool)
        return
    runs = load_runs()[0]
    if options.write_spread:
        fit = ClosedForms(runs)
    elif options.experts:
        fit = ClosedForms([run for run in runs if run.model.experts], EXPERTS)
    else:
        fit = ClosedForms([run for run in runs if not run.model.experts], EVERYWHERE, own=True)
    free = [one for _, one in fit.free]
    pairs = fit.report(solve(free, fit.residuals) if free else np.zeros(0))
    if options.write_spread:
        replace_file(resources.spread(), [spread_text(pairs)])


if __name__ == "__main__":
    main()
