"""Where runs come from: machine and software, how these differ, the commands that produce a run and each case."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from refshard.analysis.cases import CaseResult
from refshard.quantities import format_bytes, format_rate
from refshard.records import Run
from refshard.report.blocks import Row, Table, table

_OF_ONE_RUN = ("--out", "-o", "--only")
"""Options that another run does not share, each with a value."""


def environment(run: Run) -> dict[str, str]:
    """The machine and its software by label; what is not known of GPUs is left out."""
    env = run.header.environment
    commit = env.git_commit or "not a git checkout"
    threads = f"{env.gemm_threads} thread{'' if env.gemm_threads == 1 else 's'}"
    peaks = dict.fromkeys((one.peak_flops_per_s, one.peak_source) for one in run.launches)
    settings = [{**msgspec.structs.asdict(one), "nvlinks": _named(one.nvlinks)} for one in env.gpu_settings]
    gpus = {
        "GPU memory": _alike([format_bytes(size) for size in env.gpu_memory_bytes]),
        "GPU driver": env.gpu_driver,
        "CUDA": env.cuda,
        "NCCL": env.nccl,
        "fp32 products": "TF32 allowed" if env.tf32 else "",
        **{
            name.replace("_", " "): _alike(["-" if one[name] in (None, "") else str(one[name]) for one in settings])
            for name in (settings[0] if settings else ())
        },
        "throttled at the start": "; ".join(
            f"GPU {gpu}: {', '.join(why)}" for gpu, why in enumerate(env.gpu_throttled) if why
        ),
        "variables": _named(env.variables),
    }
    return {
        "environment": env.id,
        "host": env.hostname,
        "operating system": env.os,
        "processor": f"{env.cpu}, {env.physical_cores} cores ({env.logical_cores} logical)",
        "memory": format_bytes(env.memory_bytes),
        "GPUs": ", ".join(env.gpus) or "none",
        **{label: value for label, value in gpus.items() if value.strip("-")},
        "network": env.network or "none: all ranks on one host",
        "matrix multiplication": f"{format_rate(env.gemm_flops_per_s / 1e12)} TFLOPS measured, fp32, {threads}",
        "Python": env.python,
        "torch": f"{env.torch} ({', '.join(env.backends) or 'no backend'})",
        "packages": _named(env.packages) or "-",
        "refshard": f"{run.header.refshard}{f' (code {env.code_sha256[:12]})' if env.code_sha256 else ''}",
        "git commit": f"{commit} with uncommitted changes" if env.git_dirty else commit,
        "peak for MFU": "; ".join(f"{format_rate(peak / 1e12)} TFLOPS per rank: {why}" for peak, why in peaks if peak),
        "FLOPs convention": ", ".join(dict.fromkeys(filter(None, (one.flops_convention for one in run.launches)))),
        "recompute": ", ".join(dict.fromkeys(str(one.recompute) for one in run.launches if one.recompute)),
    }


def _named(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))


def _alike(values: Sequence[str]) -> str:
    """One value if all GPUs agree, else each GPU's."""
    if len(set(values)) <= 1:
        return "".join(values[:1])
    return "; ".join(f"GPU {gpu}: {value}" for gpu, value in enumerate(values))


def environment_differences(runs: Sequence[Run]) -> Table:
    """What differs between the runs' machines and software, a column for each run."""
    found = [environment(run) for run in runs]
    rows: list[Row] = [
        {"field": label, **{name: one.get(label) for name, one in zip(run_names(runs), found)}}
        for label in dict.fromkeys(label for one in found for label in one)
        if len({one.get(label, "") for one in found}) > 1
    ]
    return table(rows, left=len(runs) + 1, caption="Differences between the runs")


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run, its id; with a number if two share it."""
    ids = [run.header.run_id for run in runs]
    return [f"{id_} ({ids[: n + 1].count(id_)})" if ids.count(id_) > 1 else id_ for n, id_ in enumerate(ids)]


def case_command(case: CaseResult, others: Sequence[CaseResult]) -> str:
    """The command line that measures one case again, quoted for a shell: that of its run, for this case only.

    It names the case by its hash if ``others`` have the same name.
    """
    named = [other for other in others if other.header is case.header and other.spec.name == case.spec.name]
    kept, skip = list[str](), False
    for word in case.header.environment.argv:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if skip or option in _OF_ONE_RUN:
            skip = not skip and word in _OF_ONE_RUN
        else:
            kept.append(word)
    if "--resume" in kept or kept[1:2] != ["run"]:
        kept = ["refshard", "run", f"suites/{case.header.suite.name}.toml"]
    return shlex.join([Path(kept[0]).name, *kept[1:], "--only", case.spec.name if len(named) == 1 else case.spec.hash])
