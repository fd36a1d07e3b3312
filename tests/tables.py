"""Tables of the docs that are made from ``profiles/recorded`` and ``validation``, as lines of Markdown.

Functions are named after what a table shows; pages call them in marked values (:mod:`tests.values`).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby, takewhile
from statistics import median
from typing import Any

from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.quantities import GIB, format_bytes, format_percent, format_seconds
from refshard.records import METRICS
from refshard.specs.hardware import load_hardware
from tests.printed import ROOT, as_json
from tests.races import FOLDER, REPORTS
from validation.dry_runs import recorded_cases
from validation.fragmentation import table_lines
from validation.schema import scripted_runs

Row = dict[str, Any]
_RECORDED = ROOT / "profiles" / "recorded"
_ENGINE = "xeon-2-cores/engine"
_LINK = "xeon-2-cores/engine_network"
_TRAINING = {"model": "llama-mini", "workload": "training"}
_SHARD = "xeon-2-cores/when_to_shard"
_LIMITS = "epyc-2-cores/least_memory"
_WAYS = ("fsdp2", "fsdp2-tuned", "refshard-yafsdp", "tensor-parallel")
_OVER_DDP = ("model", "tokens a rank", "`ddp`", *(f"`{way}` / `ddp`" for way in _WAYS))
_PLANNED = (
    ("llama3.2-1b", "dgx-h100", 8192),
    ("llama3.2-1b", "dgx-h100", 512),
    ("llama3.2-1b", "h100-eth100x2", 8192),
    ("llama3-8b", "dgx-h100", 8192),
    ("llama3-8b", "h100-eth100x2", 8192),
)
_PLANNED_WAYS = ("ddp", "fsdp2", "refshard-yafsdp", "refshard-zero1", "refshard-zero2")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """A table, its first columns left and the others right."""
    lines = [heads, [*["---"] * left, *["---:"] * (len(heads) - left)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


@cache
def rows_of(run: str, against: str = "") -> list[Row]:
    """The cases of a recorded run; with ``against``, with their ratios to that strategy."""
    rows: list[Row] = as_json("show", str(_RECORDED / run))["cases"]
    if against:
        compared = as_json("compare", against, "--run", str(_RECORDED / run))["cases"]
        ratios = {row["case"]: row for row in compared}
        rows = [{**row, **ratios.get(row["case"], {})} for row in rows]
    return rows


def by_strategy(run: str, against: str = "", **having: Any) -> dict[str, Row]:
    """The cases with these keys, by strategy."""
    chosen = (row for row in rows_of(run, against) if all(row[key] == value for key, value in having.items()))
    return {row["strategy"]: row for row in chosen}


def cases(columns: Mapping[str, Callable[[Row], str]], rows: Iterable[Row]) -> list[str]:
    """A table of cases: what each column's head shows of one."""
    return markdown(tuple(columns), [[cell(row) for cell in columns.values()] for row in rows])


def name(row: Row) -> str:
    """Its strategy."""
    return f"`{row['strategy']}`"


def step(row: Row) -> str:
    """Its step time, or its state."""
    return format_seconds(row["step_time_s"]) if row["state"] == "ok" else row["state"]


def ratio(row: Row) -> str:
    """The ratio of step times, with its interval where it has one."""
    found, low, high = (row.get(f"step_time_ratio{end}") for end in ("", "_low", "_high"))
    if found is None:
        return ""
    return f"{found:.2f}" if low is None else f"{found:.2f} ({low:.2f} to {high:.2f})"


def exposed(row: Row) -> str:
    """Exposed communication; a dash where nothing is communicated."""
    return format_seconds(row["exposed_comm_s"] if row["comm_s"] else None)


def peak(row: Row) -> str:
    """Peak of allocated memory."""
    return format_bytes(row["peak_memory_bytes"])


def reserved(row: Row) -> str:
    """Peak of reserved memory."""
    return format_bytes(row["peak_reserved_bytes"])


# The engine and its peers (measured.md)


def engine_on_two_ranks() -> list[str]:
    """The engine beside FSDP2 and DDP, over loopback and over a link."""
    loopback, link = (by_strategy(run, "refshard-yafsdp", **_TRAINING) for run in (_ENGINE, _LINK))
    columns = {
        "strategy": name,
        "loopback: step": step,
        "over `refshard-yafsdp`'s": ratio,
        "2 Gbit/s: step": lambda row: step(link[row["strategy"]]),
        "2 Gbit/s: over `refshard-yafsdp`'s": lambda row: ratio(link[row["strategy"]]),
        "2 Gbit/s: exposed": lambda row: exposed(link[row["strategy"]]),
        "peak memory": peak,
    }
    return cases(columns, loopback.values())


def inference() -> list[str]:
    """Forward and loss without gradients on two ranks."""
    columns = {"strategy": name, "step": step, "over DDP's": ratio, "peak memory": peak}
    return cases(columns, by_strategy(_ENGINE, "ddp", workload="inference").values())


def engine_on_h100s() -> list[str]:
    """Dry runs of Llama 3 8B and 70B, one sequence a GPU, sharded over all GPUs."""
    policy = {"llama3-8b": "selective", "llama3-70b": "full"}
    rows = [
        row
        for row in rows_of("dryrun/engine_h100")
        if row["global_batch"] == row["gpus"] and row["dp_replicate"] == 1
        if row["checkpointing"] == policy[row["model"]]
    ]
    columns = {
        "model": lambda row: row["model"],
        "GPUs": lambda row: str(row["gpus"]),
        "strategy": name,
        "step": step,
        "exposed": exposed,
        "peak reserved": reserved,
        "peak allocated": peak,
    }
    return cases(columns, sorted(rows, key=lambda row: (row["model"] != "llama3-8b", row["gpus"])))


def benchmark(name: str) -> list[Row]:
    """The benchmarks of a file of pytest-benchmark, from the machine that measured the engine."""
    found: list[Row] = json.loads((_RECORDED / "xeon-2-cores" / f"{name}.json").read_text())["benchmarks"]
    return found


def work_added() -> list[str]:
    """What sharding adds to a step: kernels, waits, collectives, and time of the host."""
    counted, host = benchmark("kernels")[0]["extra_info"], benchmark("host_time")[0]["extra_info"]["added_s"]
    rows = []
    for way, counts in counted["counts"].items():
        if way != "bare":
            numbers = map(str, (counted["added"][way], counts["WAIT"], counts["COLLECTIVE"]))
            rows.append((f"`{way}`", *numbers, format_seconds(host.get(way))))
    return markdown(("strategy", "kernels added", "waits between streams", "collectives", "host time added"), rows)


_PARTS = {
    "free": "the model, with an optimizer over half of it",
    "no wire": "`refshard-yafsdp` with collectives that do nothing",
    "engine": "`refshard-yafsdp`",
    "kept": "`refshard-yafsdp-kept`",
    "ddp": "`ddp`",
    "fsdp2-tuned": "`fsdp2-tuned`",
    "exchange": "the engine's collectives alone",
}


def step_parts() -> list[str]:
    """Where the time of a step goes over loopback, and the part of FSDP2's cost that is saved."""
    found = benchmark("step_parts")[0]["extra_info"]
    rows = []
    for way, (wall, processor) in found["medians"].items():
        saved = format_percent(found["saved"][way], 0) if way in found["saved"] else ""
        rows.append((_PARTS[way], format_seconds(wall), format_seconds(processor), saved))
    return markdown(("part", "step", "processor time", "saved of FSDP2's cost"), rows)


def aims() -> list[str]:
    """What the engine aimed at, and what it reached."""
    loopback, link = (by_strategy(run, "refshard-yafsdp", **_TRAINING) for run in (_ENGINE, _LINK))
    parts, counted = (benchmark(name)[0]["extra_info"] for name in ("step_parts", "kernels"))
    blocks = benchmark("blocks")[1]["extra_info"]["vocabulary 128256"]
    shorter = link["fsdp2-tuned"]["step_time_s"] - link["refshard-yafsdp"]["step_time_s"]
    rows = []
    for where, found, other, aim in (
        ("loopback", loopback, "fsdp2-tuned", 1.2),
        ("loopback", loopback, "fsdp2", 1.4),
        ("2 Gbit/s", link, "fsdp2-tuned", 1.5),
        ("2 Gbit/s", link, "fsdp2", 2.0),
        ("2 Gbit/s", link, "ddp", 1.0),
    ):
        low, high = (found[other][f"step_time_ratio_{end}"] for end in ("low", "high"))
        met = "met" if low >= aim else "missed" if high < aim else "not shown"
        rows.append((f"{where}: step of `{other}` / `refshard-yafsdp`", f"{aim} or more", ratio(found[other]), met))
    for what, aim, reached in (
        ("loopback: part saved of `fsdp2-tuned`'s cost", 0.7, parts["saved"]["engine"]),
        ("2 Gbit/s: the same", 0.7, shorter / (shorter + link["refshard-yafsdp"]["exposed_comm_s"])),
    ):
        rows.append((what, f"{aim} or more", f"{reached:.2f}", "met" if reached >= aim else "missed"))
    for what, aim, values in (
        (
            "host time added / FSDP2's",
            0.2,
            [benchmark("host_time")[0]["extra_info"]["ratio_to_fsdp2"]["refshard-yafsdp"]],
        ),
        ("kernels added / FSDP2's", 0.5, [counted["ratio_to_fsdp2"]["refshard-yafsdp"]]),
        ("allocated memory / FSDP2's, Llama 3 8B on H100s", 1.0, _over_fsdp2("peak_memory_bytes")),
        ("reserved memory / FSDP2's, the same", 0.92, _over_fsdp2("peak_reserved_bytes")),
        ("memory of blocks of Llama 3 8B / `fsdp2-tuned`'s", 1.0, [blocks["ratio_of_refshard_yafsdp"]["fsdp2-tuned"]]),
        ("memory planned / the least possible", 1.03, [blocks["arena_over_bound"]]),
    ):
        text = " to ".join(dict.fromkeys(f"{pick(values):.2f}" for pick in (min, max)))
        rows.append((what, f"{aim} or less", text, "met" if max(values) <= aim else "missed"))
    return markdown(("measure", "aim", "reached", ""), rows)


def _over_fsdp2(key: str) -> list[float]:
    """``refshard-yafsdp``'s memory over FSDP2's, in dry runs of Llama 3 8B on 8 and 64 GPUs."""
    found: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for row in rows_of("dryrun/engine_h100"):
        if row["model"] == "llama3-8b" and row["gpus"] in (8, 64) and row["dp_replicate"] == 1:
            found[row["gpus"], row["global_batch"], row["checkpointing"]][row["strategy"]] = row[key]
    return [ways["refshard-yafsdp"] / ways["fsdp2"] for ways in found.values()]


def reading_traces() -> list[str]:
    """How long refshard and HTA take to read a trace, each on one core."""
    alone, both = benchmark("tracing")
    ways = [("refshard", alone["extra_info"]["bytes"], alone["stats"]["data"], alone["extra_info"]["peak_rss_bytes"])]
    for tool, key in (("refshard", "refshard"), (f"HTA {both['extra_info']['hta']}", "hta")):
        found = {what: both["extra_info"][what][key] for what in ("seconds", "peak_rss_bytes")}
        ways.append((tool, both["extra_info"]["bytes"], found["seconds"], found["peak_rss_bytes"]))
    rows = [(tool, f"{n / 1e6:,.0f} MB", format_seconds(median(s)), format_bytes(rss)) for tool, n, s, rss in ways]
    return markdown(("tool", "trace", "time", "peak memory"), rows)


def peers() -> list[str]:
    """Every peer that runs on a CPU."""
    rows = by_strategy("epyc-2-cores/peers", "ddp").values()
    columns = {"strategy": name, "step": step, "over DDP's": ratio, "peak memory": peak, "exposed": exposed}
    return cases(columns, [row for row in rows if row["state"] == "ok"])


def finetuning() -> list[str]:
    """Full fine-tuning, LoRA and QLoRA."""
    ways = {how: by_strategy("epyc-2-cores/finetune", tuning=how, gpus=2) for how in ("full", "lora", "qlora")}
    rows = []
    for strategy in dict.fromkeys(strategy for found in ways.values() for strategy in found):
        cells = [(step(row), peak(row)) if (row := found.get(strategy)) else ("", "") for found in ways.values()]
        rows.append((f"`{strategy}`", *chain(*cells)))
    return markdown(("strategy", *(f"{how}: {what}" for how in ways for what in ("step", "memory"))), rows)


def muon() -> list[str]:
    """Dry runs of Llama 3 8B with AdamW and with Muon."""
    ways: dict[tuple[int, str], dict[str, Row]] = defaultdict(dict)
    for row in rows_of("dryrun/muon_h100"):
        ways[row["gpus"], row["strategy"]][row["optimizer"]] = row
    rows = [
        (str(gpus), f"`{strategy}`", step(found["adamw"]), *(show(found["muon"]) for show in (step, exposed, reserved)))
        for (gpus, strategy), found in ways.items()
    ]
    heads = ("GPUs", "strategy", "step with AdamW", "with Muon", "exposed with Muon", "peak reserved with Muon")
    return markdown(heads, rows)


def knobs() -> list[str]:
    """Dry runs of Llama 3 8B with FSDP2's knobs: step time and reserved memory."""
    ways: dict[tuple[int, int], dict[str, Row]] = defaultdict(dict)
    for row in rows_of("dryrun/fsdp2_knobs_h100"):
        ways[row["seq_len"], row["gpus"]][row["strategy"]] = row
    rows = [
        (f"`{strategy}`", *(f"{step(found[strategy])}, {reserved(found[strategy])}" for found in ways.values()))
        for strategy in next(iter(ways.values()))
    ]
    return markdown(("strategy", *(f"{tokens:,} tokens, {gpus} GPUs" for tokens, gpus in ways)), rows)


# When to shard (plan.md)


def settings() -> Iterator[tuple[str, str, dict[str, Row]]]:
    """Model, tokens a rank, and the cases of two ranks by strategy."""

    def key(row: Row) -> tuple[bool, int]:
        return row["model"] != "llama-tiny", row["global_batch"] // 2 * row["seq_len"]

    rows = [row for row in rows_of(_SHARD, "ddp") if row["gpus"] == 2 and row["microbatches"] == 1]
    for (_, tokens), members in groupby(sorted(rows, key=key), key):
        found = {row["strategy"]: row for row in members}
        yield found["ddp"]["model"], f"{tokens:,}", found


def speed_of_sharding() -> list[str]:
    """DDP's step time, and how many times as long the others take."""
    rows = [(model, n, step(found["ddp"]), *(ratio(found[way]) for way in _WAYS)) for model, n, found in settings()]
    return markdown(_OVER_DDP, rows)


def memory_of_sharding() -> list[str]:
    """DDP's peak, and the others' as a part of it."""
    rows = [
        (model, tokens, peak(found["ddp"]), *(f"{found[way]['peak_memory_ratio']:.2f}" for way in _WAYS))
        for model, tokens, found in settings()
    ]
    return markdown(_OVER_DDP, rows)


def least_memory() -> list[str]:
    """A strategy's peak as the allocator counts, and the lowest limit from which on every launch ran."""
    rows = []
    limited = [row for row in rows_of(_LIMITS) if row["gpus"] == 2]
    limited.sort(key=lambda row: (row["strategy"], -row["memory_limit_gib"]))
    for _, members in groupby(limited, name):
        first, *others = members
        *_, last = takewhile(lambda row: row["state"] == "ok", (first, *others))
        rows.append((name(first), peak(first), f"{last['memory_limit_gib']} GiB"))
    return markdown(("strategy", "peak, as the allocator counts", "lowest limit"), rows)


@cache
def planned(
    model: str, cluster: str, tokens: int, replicas: int = 1, ways: tuple[str, ...] = _PLANNED_WAYS
) -> dict[str, Row]:
    """The plan's rows by strategy, those that fit and those that do not."""
    job = ["--model", model, "--cluster", cluster, "--seq-len", str(tokens), "--dp-replicate", str(replicas)]
    (size,) = as_json("plan", *job, "--strategy", ",".join(ways))["sizes"]
    return {row["job"]["strategy"]: row for row in (*size["rows"], *size["unfit"])}


def plans_of_sharding() -> list[str]:
    """Each strategy's step time and peak memory by plan; hybrid: FSDP within a node, replicated between nodes."""
    rows = []
    for model, cluster, tokens in _PLANNED:
        found = planned(model, cluster, tokens)
        hybrid = ""
        if cluster.endswith("x2"):
            hybrid = _in_cell(planned(model, cluster, tokens, 2, ("refshard-fsdp",))["refshard-fsdp"])
        rows.append((model, f"`{cluster}`", f"{tokens:,}", *(_in_cell(found[name]) for name in _PLANNED_WAYS), hybrid))
    return markdown(
        ("model", "cluster", "tokens a rank", *(f"`{name}`" for name in _PLANNED_WAYS), "`refshard-fsdp`, hybrid"), rows
    )


def _in_cell(row: Row) -> str:
    if not row["fits"]:
        return f"does not fit ({row['peak_bytes'] / GIB:.0f} GiB)"
    return f"{format_seconds(row['step_s'])}, {row['peak_bytes'] / GIB:.0f} GiB"


def fragmentation() -> list[str]:
    """How much more memory runs need than their closed form's peak, by allocator mode."""
    heads = ("kind", "runs", "expandable segments, median", "most", "fixed (the default), median", "most")
    return [*markdown(heads, []), *table_lines()]


# Why trust a number (validation.md)


@cache
def published() -> list[Row]:
    """Published figures beside their dry runs: ``runs`` of ``refshard validate --fidelity dryrun --json``."""
    found: list[Row] = json.loads((ROOT / "validation" / "dry_runs.json").read_text())
    return found


_KINDS = {
    "mixtures of experts": "mixtral|deepseek",
    "compiled": "compiled",
    "one GPU, adapters": "mistral|llama3.2",
    "dense, eager": "",
}


def kind_of_run(name: str) -> str:
    """Which of the kinds of published runs a name is of."""
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, name))


def errors_of_dry_runs(*, speed: bool, kind: str = "", half: str = "", all_stated: bool | None = None) -> list[float]:
    """Absolute errors of the figures that count: memory whose allocator mode is stated, or tokens/s."""
    states = {name: one.run.states_all for name, one in scripted_runs().items()}
    return [
        abs(figure["error"])
        for run in published()
        if kind in ("", kind_of_run(run["name"]))
        and half in ("", run["half"])
        and all_stated in (None, states[run["name"]])
        for figure in run["compared"]
        if (figure["figure"] == "tokens/s/GPU") is speed and not _two_modes(figure)
    ]


def _two_modes(figure: Row) -> bool:
    """Reserved memory, where the source does not state the allocator's mode."""
    return figure["other_mode"] is not None and figure["figure"].startswith("reserved")


def nearer_mode() -> list[float]:
    """Absolute errors of reserved memory whose allocator mode is not stated, in the mode that is nearer."""
    figures = [figure for run in published() for figure in run["compared"] if _two_modes(figure)]
    return [
        min(abs(figure[side] / figure["published"] - 1) for side in ("predicted", "other_mode")) for figure in figures
    ]


def spread(errors: Sequence[float], digits: int = 1) -> str:
    """Median and worst, and of how many."""
    if not errors:
        return "none"
    return f"{format_percent(median(errors), digits)}, {format_percent(max(errors), digits)} ({len(errors)})"


def dry_runs_of_published() -> list[str]:
    """Errors on the held-out half by kind, and how many sources state all settings."""
    states = {name: one.run.states_all for name, one in scripted_runs().items()}
    rows = []
    for kind in (*reversed(_KINDS), ""):
        names = [run["name"] for run in published() if kind in ("", kind_of_run(run["name"]))]
        counts = (len(names), sum(states[run] for run in names))
        memory = spread(errors_of_dry_runs(speed=False, kind=kind, half="held out"), 2)
        speed = spread(errors_of_dry_runs(speed=True, kind=kind, half="held out"))
        rows.append((kind or "all", *map(str, counts), memory, speed))
    return markdown(("runs", "number", "state all settings", "memory: median, worst", "tokens/s: median, worst"), rows)


def every_published_run() -> list[str]:
    """One row a figure: published, dry run, error."""
    rows = []
    for run in published():
        for figure in run["compared"]:
            form = "{:,.0f}" if figure["figure"] == "tokens/s/GPU" else "{:,.2f} GiB"
            sides = [figure["predicted"], *([figure["other_mode"]] if _two_modes(figure) else [])]
            told = " or ".join(form.format(one) for one in sorted(sides))
            errors = [figure["error"]] if len(sides) == 1 else [one / figure["published"] - 1 for one in sorted(sides)]
            off = " or ".join(f"{100 * error:+.2f} %" for error in errors)
            cells = (figure["figure"], form.format(figure["published"]), told, off)
            rows.append((f"{run['name']} ({run['half']})", *cells))
    return markdown(("run", "figure", "published", "dry run", "error"), rows)


def h200_before() -> list[str]:
    """Launches on the H200 beside what had been predicted before they ran."""
    columns = []
    for predicted, runs in (("predicted-first", (1,)), ("predicted-hgx-h200", (2, 3))):
        known = {row["name"]: row for row in _lines(predicted) if row.get("step_s")}
        launches = [row for run in runs for row in _lines(f"cases-{run}") if row["name"] in known and "peak" in row]
        memory = [abs(known[row["name"]]["peak"]["reserved"] / row["peak"]["reserved"] - 1) for row in launches]
        wide = [row for row in launches if not row["name"].startswith("narrow")]
        times = [abs(known[row["name"]]["step_s"] / row["step_s"] - 1) for row in wide]
        counts = (len(memory), memory.count(0.0), sum(error < 0.002 for error in memory))
        columns.append((*map(str, counts), format_percent(max(memory)), format_percent(median(times), 0)))
    heads = ("launches", "reserved memory equal to the byte", "within 0.2 %", "worst: DDP", "step time: median error")
    return markdown(("predicted before", "run 1", "runs 2 and 3"), zip(heads, *columns))


def _lines(name: str) -> list[Row]:
    return [json.loads(line) for line in (_RECORDED / "h200" / f"{name}.jsonl").read_text().splitlines()]


def h200_errors(figure: str, half: str = "", *, narrow: bool = True) -> list[float]:
    """Absolute errors of the H200's cases as predicted now; ``narrow`` cases are bound by the host."""
    found = [one for one in recorded_cases() if one.figure == figure and half in ("", one.half)]
    return [abs(one.error) for one in found if narrow or not one.name.startswith("narrow")]


def closed_form_on_h200(case: str = "8b-w8-full") -> float:
    """Error of a plan's step of rank 0 of 8, full checkpointing; without exchange, as the H200 had no network."""
    options = ("--model", "llama3-8b", "--cluster", "hgx-h200", "--strategy", "fsdp2", "--checkpointing", "full")
    parts = as_json("plan", *options)["sizes"][0]["rows"][0]["parts"]
    measured = next(one.measured for one in recorded_cases() if one.name == case and one.figure == "step time")
    return float((parts["compute"] + parts["optimizer"]) / measured - 1)


def h200_now() -> list[str]:
    """The H200's cases as predicted now."""
    memory = h200_errors("reserved")
    equal = f"{memory.count(0.0)} of {len(memory)} equal to the byte, worst {format_percent(max(memory))}"
    rows: list[tuple[str, ...]] = [("reserved memory, nothing fitted", equal, "")]
    for name, narrow in (("step time, all", True), ("step time, without `narrow-`", False)):
        rows.append((name, *(spread(h200_errors("step time", half, narrow=narrow)) for half in ("fit", "held out"))))
    return markdown(("median, worst (cases)", "fit", "held out"), rows)


def every_h200_case() -> list[str]:
    """One row a case of the H200."""
    rows = []
    for _, (memory, time) in groupby(recorded_cases(), lambda one: one.name):
        off = "equal" if memory.predicted == memory.measured else f"{100 * memory.error:+.2f} %"
        times = (format_seconds(time.measured), f"{100 * time.error:+.0f} %")
        rows.append((f"{time.name} ({time.half})", f"{memory.measured:.3f} GiB", off, *times))
    return markdown(("case", "reserved", "dry run", "step", "dry run"), rows)


def engine_on_h200() -> list[str]:
    """One rank of FSDP2 beside one of the engine on the H200, in runs 2 and 3."""
    launches = [row for run in (2, 3) for row in _lines(f"cases-{run}") if "peak" in row]
    rows = []
    for case, ways in (
        ("Llama 3.2 1B, one rank", ("1b-fsdp2", "1b-refshard")),
        ("Llama 3 8B, rank 0 of 8, selective checkpointing", ("8b-w8-sel", "8b-w8-refshard-sel")),
    ):
        found = [[row for row in launches if row["name"] == way] for way in ways]
        times = [sorted(row["step_s"] for row in some) for some in found]
        memory = [format_bytes(some[0]["peak"]["reserved"]) for some in found]
        cells = [", ".join(map(format_seconds, some)) for some in times]
        rows.append((case, *cells, f"{median(times[0]) / median(times[1]):.2f}", *memory))
    return markdown(("case", "FSDP2's steps", "the engine's", "ratio", "FSDP2 reserves", "the engine"), rows)


def memory_outside() -> list[str]:
    """Public messages of memory outside of torch's allocator, beside estimates for 1 and 4 communicators."""
    found = json.loads((ROOT / "validation" / "outside_memory.json").read_text())
    first, further = (size / GIB for size in COMMUNICATOR_BYTES)
    rows = []
    for title, kind, gpus, known in (
        ("one GPU", "one GPU", "", ""),
        ("data parallel, A100", "data parallel", "A100", "a100-sxm-80gb"),
        ("data parallel, H100", "data parallel", "H100", "h100-sxm-80gb"),
        ("data parallel, other", "data parallel", "RTX|L20|V100", "l40s"),
        ("several kinds of groups, Hopper", "several groups", "", "h100-sxm-80gb"),
    ):
        sizes = sorted(
            row["in_use_gib"] - row["allocated_gib"] - row["unallocated_gib"]
            for row in found
            if row["kind"] == kind and re.search(gpus, row["gpu"])
        )
        estimate = f"{context(load_hardware('l40s')).bytes / GIB:.2f} GiB"
        if known:
            base = context(load_hardware(known)).bytes / GIB + first
            estimate = f"{base:.2f} to {base + 3 * further:.2f} GiB"
        rows.append(
            (title, str(len(sizes)), f"{median(sizes):.2f} GiB", f"{sizes[0]:.2f} to {sizes[-1]:.2f} GiB", estimate)
        )
    return markdown(("processes", "messages", "median", "range", "estimate"), rows)


# How a dry run works (dryrun.md)


def races() -> list[str]:
    """Reports of races, and which of them a dry run finds."""
    rows = []
    for script, report in REPORTS.items():
        text = (FOLDER / f"{script}.py").read_text().split('"""')[1]
        links = re.findall(r"https://github\.com/([\w.-]+/[\w.-]+)/(issues|pull)/(\d+)", text)
        named = ", ".join(f"[{where}#{n}](https://github.com/{where}/{kind}/{n})" for where, kind, n in links)
        about = " ".join(text.partition("\n\n")[0].split())
        rows.append((named, f"`{script}`", about, "yes" if report.race else f"no: {report.why}"))
    return markdown(("report", "script", "what races", "found"), rows, left=4)


# Reference


def metrics() -> list[str]:
    """The metrics of a case as records, tables and ``--json`` name them."""
    rows = [(f"`{m.name}`", m.label, m.unit, m.better, m.kind, m.meaning.replace("|", "\\|")) for m in METRICS.values()]
    return markdown(("name", "label", "unit", "better", "kind", "meaning"), rows, left=6)
