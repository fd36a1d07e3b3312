"""Fit a few constants of the profiles to the published runs of this folder that are marked for it; print both halves.

    python profiles/published_parallel/fit.py [--write-spread]

Runs that differ only in their number of GPUs, their release or their file are one *setting*. Of each table and
accelerator, every other setting is fitted, in the order of the file, and the others are held out. Each setting counts
once, however many runs it has.

The fit makes the sum over the fitted settings of log(predicted / published)^2 / NOISE^2 least, with large errors
counted less (a run whose source leaves something out says little), plus one term (log(constant / said) / width)^2 for
each constant: what its source says counts as one more observation. Constants that dry runs are fitted on
(``profiles/published_runs/fit.py``) are left alone.

``--write-spread`` writes the errors of the held-out half by kind of configuration to ``profiles/spread.toml``, from
which plans take their error bars.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from refshard import resources
from refshard.estimate import exchange, kernels, layers
from refshard.estimate.published import Published, half_of, load_runs, predicted
from refshard.estimate.spread import kind_of
from refshard.folders import replace_file
from refshard.specs.cluster import ClusterSpec
from refshard.specs.hardware import ClosedForms

NOISE = 0.05
"""Of a published step time, as a fraction."""
Values = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number of a cluster's profile, or of its hardware's, by its path; what its source says, and within which
    factor exp(width) that is known.
    """

    path: str
    said: float
    width: float


MEASURED, ESTIMATED, UNKNOWN = 0.08, 0.2, 1.0
_BF16, _FP8 = "hardware.matmul.bf16.efficiency", "hardware.matmul.fp8.efficiency"
_AVERAGE_BF16 = "hardware.closed_forms.bf16_efficiency"
_ATTENTION, _MEMORY = "hardware.attention.bf16.efficiency", "hardware.closed_forms.memory_bytes_per_s"
_CUDNN, _TRITON = "hardware.attention_kernels.cudnn", "hardware.attention_kernels.triton"
CONSTANTS: dict[str, tuple[Constant, ...]] = {
    "dgx-h100": (
        Constant(path=_AVERAGE_BF16, said=0.67, width=ESTIMATED), Constant(path=_FP8, said=0.67, width=ESTIMATED),
        Constant(path=_ATTENTION, said=0.33, width=MEASURED), Constant(path=_CUDNN, said=1.55, width=MEASURED),
        Constant(path=_TRITON, said=0.6, width=UNKNOWN), Constant(path=_MEMORY, said=2.93e12, width=ESTIMATED),
    ),
    "dgx-a100": (Constant(path=_TRITON, said=0.6, width=UNKNOWN),),
    "dgx-a100-40gb": (
        Constant(path=_TRITON, said=0.6, width=UNKNOWN), Constant(path=_BF16, said=0.70, width=ESTIMATED),
    ),
    # DGX A100's; the adapters of this cluster are not published.
    "yafsdp-a100": (Constant(path="between.bytes_per_s", said=185e9, width=UNKNOWN),),
    "torchtitan-h100": (
        Constant(path=_FP8, said=0.5, width=ESTIMATED),
        # One adapter of 400 Gbit/s for each GPU, at 80 %.
        Constant(path="between.bytes_per_s", said=320e9, width=ESTIMATED),
    ),
    "hgx-h200": (
        Constant(path=_FP8, said=0.67, width=ESTIMATED), Constant(path=_AVERAGE_BF16, said=0.67, width=ESTIMATED),
    ),
    "simumax-b200": (
        Constant(path=_BF16, said=0.488, width=MEASURED), Constant(path=_ATTENTION, said=0.35, width=ESTIMATED),
        Constant(path="hardware.kernel_s", said=30e-6, width=ESTIMATED),
    ),
    "hgx-b200": (Constant(path=_FP8, said=0.57, width=ESTIMATED),),
    "gb200-nvl72": (
        Constant(path=_BF16, said=0.64, width=ESTIMATED), Constant(path=_FP8, said=0.57, width=ESTIMATED),
        Constant(path=_CUDNN, said=1.55, width=ESTIMATED),
    ),
    "gb300-nvl72": (Constant(path=_FP8, said=0.57, width=ESTIMATED), Constant(path=_CUDNN, said=1.55, width=ESTIMATED)),
}  # fmt: skip
"""By cluster. Clusters with the hardware of another take its constants (:data:`SHARES`)."""
SHARES = {"h100-roce": "dgx-h100", "kempner-h200": "hgx-h200"}
EVERYWHERE = {
    "EAGER_PART": Constant(path="EAGER_PART", said=0.8, width=ESTIMATED),
    "RING_PART": Constant(path="RING_PART", said=0.8, width=ESTIMATED),
    "QUANTISED_BYTES": Constant(path="QUANTISED_BYTES", said=4.0, width=UNKNOWN),
    "SKEW": Constant(path="SKEW", said=1.0, width=UNKNOWN),
    "straggling": Constant(path="straggling", said=0.004, width=UNKNOWN),
}
"""Constants of the closed forms, and of all clusters alike."""


def with_constants(cluster: ClusterSpec, values: Values) -> ClusterSpec:
    """The cluster, its accelerator in it, with each value at its path."""
    hardware = msgspec.structs.replace(
        cluster.accelerator, closed_forms=cluster.accelerator.closed_forms or ClosedForms()
    )
    tree = msgspec.to_builtins(msgspec.structs.replace(cluster, hardware=hardware))
    for path, value in values.items():
        *folders, name = path.split(".")
        place = tree
        for folder in folders:
            place = place[folder]
        place[name] = value
    for sources, name in (
        (tree["hardware"]["sources"], "closed_forms"),
        (tree["hardware"]["sources"], "attention_kernels"),
        (tree["sources"], "straggling"),
    ):
        sources.setdefault(name, "fitted")
    return msgspec.convert(tree, ClusterSpec)


class Fit:
    """The runs, by the cluster that their constants belong to."""

    def __init__(self, runs: Sequence[Published]) -> None:
        self.of: dict[str, list[Published]] = defaultdict(list)
        for run in runs:
            self.of[SHARES.get(run.cluster_name, run.cluster_name)].append(run)
        self.free = [*((None, one) for one in EVERYWHERE.values())]
        self.free += [(name, one) for name in self.of for one in CONSTANTS.get(name, ())]
        self._known: dict[tuple[object, ...], npt.NDArray[np.float64]] = {}

    def errors(self, logs: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """log(predicted / published) of each cluster's runs."""
        return {name: self._errors(name, logs) for name in self.of}

    def values(self, logs: npt.NDArray[np.float64]) -> list[float]:
        """The constants, in the order of ``free``."""
        return [one.said * exp(x) for (_, one), x in zip(self.free, logs)]

    def _errors(self, name: str, logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        values = self.values(logs)
        common = {one.path: value for (owner, one), value in zip(self.free, values) if owner is None}
        own = {one.path: value for (owner, one), value in zip(self.free, values) if owner == name}
        key = (name, *common.values(), *own.values())
        if key not in self._known:
            layers.EAGER_PART = common.pop("EAGER_PART", layers.EAGER_PART)
            layers.RING_PART = common.pop("RING_PART", layers.RING_PART)
            exchange.SKEW = common.pop("SKEW", exchange.SKEW)
            kernels.QUANTISED_BYTES = common.pop("QUANTISED_BYTES", kernels.QUANTISED_BYTES)
            clusters = {id(run.cluster): with_constants(run.cluster, {**common, **own}) for run in self.of[name]}
            runs = [replace(run, cluster=clusters[id(run.cluster)]) for run in self.of[name]]
            self._known[key] = np.array([log(s / run.seconds) for run, (s, _) in zip(runs, predicted(runs))])
        return self._known[key]

    def residuals(self, logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of the fitted settings, each of which counts once, and of the constants."""
        parts = []
        for name, errors in self.errors(logs).items():
            runs = self.of[name]
            counts = Counter(run.setting for run in runs)
            weights = np.array([half_of(run) == "fit" for run in runs]) / np.sqrt([counts[run.setting] for run in runs])
            bounded = 3 * np.arctan(errors / NOISE / 3)
            parts.append(bounded * weights)
        return np.concatenate([*parts, [x / one.width for (_, one), x in zip(self.free, logs)]])


def report(fit: Fit, logs: npt.NDArray[np.float64]) -> dict[str, list[tuple[Published, float]]]:
    """Print constants and errors; return the held-out runs and their errors as fractions."""
    for (owner, one), value in zip(fit.free, fit.values(logs)):
        print(f"{owner or 'all clusters':<16} {one.path:<36} {value:<10.4g} (said: {one.said:.4g})")
    found: dict[str, list[tuple[Published, float]]] = {"fit": [], "held out": []}
    for name, errors in fit.errors(logs).items():
        for run, error in zip(fit.of[name], errors):
            found[half_of(run)].append((run, exp(error) - 1))
        for half, rows in _by_half(fit.of[name], errors):
            print(f"{name:<16} {half:<9} {_figures(rows)}")
    for half, pairs in found.items():
        print(f"{'all':<16} {half:<9} {_figures([error for _, error in pairs])}", flush=True)
    return found


def _by_half(runs: Sequence[Published], errors: npt.NDArray[np.float64]) -> Iterator[tuple[str, list[float]]]:
    for half in ("fit", "held out"):
        rows = [exp(error) - 1 for run, error in zip(runs, errors) if half_of(run) == half]
        if rows:
            yield half, rows


def _figures(errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    most = sizes[int(0.9 * (len(sizes) - 1))]
    return (
        f"{len(sizes):3d} runs, median error {median(sizes):.1%}, 90th percentile {most:.1%}, worst {sizes[-1]:.1%}, "
        f"bias {median(errors):+.1%}"
    )


def spread_text(pairs: Sequence[tuple[Published, float]]) -> str:
    """The held-out errors by kind, as TOML."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for run, error in pairs:
        kinds["all"].append(error)
        kinds[kind_of(run.configuration)].append(error)
    lines = ["# Written by python profiles/published_parallel/fit.py --write-spread, from the runs that were held out."]
    for kind, errors in kinds.items():
        ratios = np.array([1 / (1 + error) for error in errors])
        low, high = np.percentile(ratios, [10, 90])
        lines += [
            "", f'[kinds."{kind}"]', f"count = {len(errors)}", f"median = {median(map(abs, errors)):.4f}",
            f"low = {low:.4f}", f"high = {high:.4f}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit, or write the spread of the profiles as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-spread", action="store_true")
    options = parser.parse_args()
    fit = Fit(load_runs()[0])
    if options.write_spread:  # of the constants as they are in the profiles
        fit.free = []
    start = np.zeros(len(fit.free))
    most = [log(0.99 / one.said) if one.said < 1 else np.inf for _, one in fit.free]
    logs = start if options.write_spread else least_squares(
        fit.residuals, start, bounds=(-np.inf, most), diff_step=0.02, xtol=1e-3, ftol=1e-3
    ).x  # fmt: skip
    found = report(fit, logs)
    if options.write_spread:
        replace_file(resources.spread(), [spread_text(found["held out"])])


if __name__ == "__main__":
    main()
