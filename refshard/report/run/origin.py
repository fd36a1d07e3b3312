"""Where runs come from: machine and software, how these differ, the commands that produce a run and each case."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from refshard.analysis.cases import CaseResult
from refshard.quantities import format_bytes, format_rate
from refshard.records import Environment, Run
from refshard.report.blocks import Row, Table, table

_OF_ONE_RUN = ("--out", "-o", "--only")
"""Options that another run does not share, each with a value."""


def environment(run: Run) -> list[tuple[str, str]]:
    """The machine and its software as label and value."""
    env = run.header.environment
    commit = env.git_commit or "not a git checkout"
    threads = f"{env.gemm_threads} thread{'' if env.gemm_threads == 1 else 's'}"
    peaks = dict.fromkeys((one.peak_flops_per_s, one.peak_source) for one in run.launches)
    return [
        ("environment", env.id),
        ("host", env.hostname),
        ("operating system", env.os),
        ("processor", f"{env.cpu}, {env.physical_cores} cores ({env.logical_cores} logical)"),
        ("memory", format_bytes(env.memory_bytes)),
        ("GPUs", ", ".join(env.gpus) or "none"),
        *_of_gpus(env),
        ("network", env.network or "none: all ranks on one host"),
        ("matrix multiplication", f"{format_rate(env.gemm_flops_per_s / 1e12)} TFLOPS measured, fp32, {threads}"),
        ("Python", env.python),
        ("torch", f"{env.torch} ({', '.join(env.backends) or 'no backend'})"),
        ("packages", ", ".join(f"{name} {version}" for name, version in sorted(env.packages.items())) or "-"),
        ("refshard", run.header.refshard),
        ("git commit", f"{commit} with uncommitted changes" if env.git_dirty else commit),
        *(("peak for MFU", f"{format_rate(peak / 1e12)} TFLOPS per rank: {source}") for peak, source in peaks if peak),
        *(("FLOPs convention", name) for name in dict.fromkeys(one.flops_convention for one in run.launches) if name),
        *(("recompute", str(name)) for name in dict.fromkeys(one.recompute for one in run.launches) if name),
    ]


def environment_differences(runs: Sequence[Run]) -> Table:
    """Fields of the environment in which runs are not the same; a column a run."""
    found = [{**_fields(run.header.environment), "refshard": run.header.refshard} for run in runs]
    every = dict.fromkeys(name for one in found for name in one if name != "argv")
    fields = [name for name in every if len({repr(one.get(name)) for one in found}) > 1]
    rows: list[Row] = [
        {"field": name.replace("_", " "), **dict(zip(run_names(runs), (_text(one.get(name, "-")) for one in found)))}
        for name in fields
    ]
    return table(rows, left=len(runs) + 1, caption="What differs between the runs")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in sorted(value.items()))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _fields(env: Environment) -> dict[str, Any]:
    """Each field, and each of the GPUs' settings: one value where all GPUs agree, else one a GPU."""
    found: dict[str, Any] = msgspec.to_builtins(env)
    settings = found.pop("gpu_settings")
    for name in settings[0] if settings else ():
        values = [one[name] for one in settings]
        found[f"gpu_{name}"] = values if any(value != values[0] for value in values) else values[0]
    throttled = found.pop("gpu_throttled")
    found["gpu_throttled_at_start"] = [f"GPU {gpu}: {', '.join(why)}" for gpu, why in enumerate(throttled) if why]
    return found


def _of_gpus(env: Environment) -> list[tuple[str, str]]:
    """What is known of the GPUs, as label and value."""
    if not env.gpus:
        return []
    watts = [f"{one.power_limit_w:g} W" for one in env.gpu_settings if one.power_limit_w is not None]
    links = [", ".join(f"{count} to {end}" for end, count in one.nvlinks.items()) for one in env.gpu_settings]
    throttled = [f"GPU {gpu}: {', '.join(why)}" for gpu, why in enumerate(env.gpu_throttled) if why]
    rows = {
        "GPU memory": _alike([format_bytes(size) for size in env.gpu_memory_bytes]),
        "GPU driver": env.gpu_driver,
        "CUDA": env.cuda,
        "NCCL": env.nccl,
        "fp32 products": "TF32 allowed" if env.tf32 else "",
        "power limit": _alike(watts),
        "NVLinks": _alike([words or "none" for words in links]),
        "throttled at the start": "; ".join(throttled),
        "variables": ", ".join(f"{name}={value}" for name, value in sorted(env.variables.items())),
    }
    return [(label, value) for label, value in rows.items() if value]


def _alike(values: Sequence[str]) -> str:
    """One value where all GPUs agree, else each GPU's."""
    if len(set(values)) <= 1:
        return values[0] if values else ""
    return "; ".join(f"GPU {gpu}: {value}" for gpu, value in enumerate(values))


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run, its id; with a number where two have one."""
    ids = [run.header.run_id for run in runs]
    return [f"{id_} ({ids[: n + 1].count(id_)})" if ids.count(id_) > 1 else id_ for n, id_ in enumerate(ids)]


def command(run: Run) -> str:
    """The command line that produced the run, quoted for a shell."""
    return shlex.join(run.header.environment.argv)


def case_command(case: CaseResult, others: Sequence[CaseResult]) -> str:
    """The command line that measures one case anew, quoted for a shell: that of its run, for this case alone.

    The case goes by its name, or by its hash where ``others`` have the name too.
    """
    named = [other for other in others if other.header is case.header and other.spec.name == case.spec.name]
    name = case.spec.name if len(named) == 1 else case.spec.hash
    kept, skip = list[str](), False
    for word in case.header.environment.argv:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if skip or option in _OF_ONE_RUN:
            skip = not skip and word in _OF_ONE_RUN
            continue
        kept.append(word)
    if kept:
        kept[0] = Path(kept[0]).name
    if "--resume" in kept or kept[1:2] != ["run"]:
        kept = ["refshard", "run", f"suites/{case.header.suite.name}.toml"]
    return shlex.join([*kept, "--only", name])
