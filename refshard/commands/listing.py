"""``refshard list``: what refshard knows, by kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refshard import resources
from refshard.engine.placement import MODES
from refshard.errors import SpecError, nearest
from refshard.measure.duration import earlier_launches, expected, recorded_folders
from refshard.quantities import format_duration
from refshard.report.blocks import Answer, Block, Cell, Column, Marked, Notes, Quantity, Row, Table, table
from refshard.specs.cluster import load_cluster
from refshard.specs.hardware import HardwareSpec, load_hardware
from refshard.specs.job import OPTIONS
from refshard.specs.model import active_parameter_count, load_model
from refshard.specs.suite import load_suite
from refshard.strategies.table import OWN_MODEL, ROWS, axes_unavailable

_HEADS = {**{name: option.head for name, option in OPTIONS.items()}, OWN_MODEL: "own"}
"""Headings of the columns of marks."""
_LEGEND = (
    f"Options of a case (x: supported): {'; '.join(option.about for option in OPTIONS.values())}; any module of a "
    "factory"
)
Rows = Sequence[Mapping[str, Any]]


def listing(kind: str) -> Answer:
    """All available items of one kind, a row each.

    Raises:
        SpecError: there is no such kind.
    """
    if kind not in KINDS:
        raise SpecError(f"list: unknown '{kind}'; {nearest(kind, list(KINDS))}")
    rows, blocks = KINDS[kind]()
    return Answer(data={kind: rows}, rows=rows, blocks=blocks)


def strategies(*, cuda: bool) -> tuple[Rows, Sequence[Block]]:
    """Every strategy: what it is, whether it can run where there are GPUs or none, and which options it supports."""
    why = {name: row.unavailable(cuda=cuda) for name, row in ROWS.items()}
    columns = [Column("strategy", "left"), Column("here", "left"), Column("description", "left", wraps=True)]
    cells: list[list[Cell]] = [[name, _here(why[name]), row.about] for name, row in ROWS.items()]
    marks = [Column("strategy", "left"), Column(" ".join(_HEADS.values()), "left")]
    marked = [[name, _marks(row.axes)] for name, row in ROWS.items()]
    reasons = [f"{name}: unsupported: {reason}" for name, reason in why.items() if reason]
    reasons += [f"under any strategy: unsupported: {reason}" for reason in axes_unavailable(_HEADS)]
    rows = [
        {"strategy": name, "about": row.about, "unavailable": why[name] or None, "axes": sorted(row.axes)}
        for name, row in ROWS.items()
    ]
    return rows, [
        Table(columns=columns, rows=cells),
        Table(columns=marks, rows=marked, title=_LEGEND, where="detail"),
        Notes(sentences=[*reasons, "-v shows which options of a case each strategy supports."]),
    ]


def _here(why_not: str) -> Marked:
    return Marked("unsupported", "doubtful") if why_not else Marked("available", "good")


def _marks(axes: frozenset[str]) -> str:
    return " ".join(("x" if axis in axes else "-").ljust(len(head)) for axis, head in _HEADS.items())


def _strategies_here() -> tuple[Rows, Sequence[Block]]:
    import torch

    return strategies(cuda=torch.cuda.is_available())


def _models() -> tuple[Rows, Sequence[Block]]:
    specs = {name: load_model(name) for name in resources.model_profiles()}
    rows: list[dict[str, Any]] = [
        {
            "model": name, "parameters": m.params, "active_parameters": active_parameter_count(m),
            "layers": m.n_layers, "dim": m.dim, "heads": m.n_heads, "kv_heads": m.n_kv_heads,
            "ffn_dim": m.ffn_dim, "vocab": m.vocab, "tied": m.tied, "source": m.source,
        }
        for name, m in sorted(specs.items(), key=lambda item: item[1].params)
    ]  # fmt: skip
    columns = [
        Column("model", "left"), Column("parameters"), Column("active"), Column("layers"), Column("dim"),
        Column("heads"), Column("KV heads"), Column("FFN dim"), Column("vocabulary"), Column("embedding", "left"),
    ]  # fmt: skip
    cells = [
        [
            row["model"], _parameters(row["parameters"]),
            _parameters(row["active_parameters"]) if row["active_parameters"] < row["parameters"] else "",
            *(row[key] for key in ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab")),
            "tied" if row["tied"] else "",
        ]
        for row in rows
    ]  # fmt: skip
    own = "Also by their ids on Hugging Face. Your own: --model FILE.toml or config.json (docs/how-to/measure.md)."
    return rows, [Table(columns=columns, rows=cells), Notes(sentences=[own])]


def _parameters(count: int) -> str:
    """A number of parameters as the field writes it.

    >>> _parameters(8_030_261_248), _parameters(29_885_952)
    ('8.03 B', '29.9 M')
    >>> _parameters(999_885_952), _parameters(1_026_408_209_408)
    ('1 B', '1.03 T')
    """
    unit, name = (1e12, "T") if count >= 999.5e9 else (1e9, "B") if count >= 999.5e6 else (1e6, "M")
    return f"{count / unit:.3g} {name}"


def _clusters() -> tuple[Rows, Sequence[Block]]:
    rows: list[dict[str, Any]] = []
    for name in resources.cluster_profiles():
        cluster = load_cluster(name)
        hardware = cluster.accelerator
        rows.append(
            {
                "cluster": name, "device": hardware.device_name or hardware.about, "nodes": cluster.nodes,
                "ranks_per_node": cluster.ranks_per_node, "memory_bytes": hardware.memory_bytes,
                "within_bytes_per_s": cluster.within.bytes_per_s,
                "between_bytes_per_s": cluster.between.bytes_per_s if cluster.between else None,
                "library": cluster.library, "about": cluster.about,
            }
        )  # fmt: skip
    cells: list[Row] = [
        {
            "cluster": row["cluster"], "GPUs per node": f"{row['ranks_per_node']} x {row['device']}",
            "memory": Quantity(row["memory_bytes"], "B"), "GB/s within a node": _bandwidth(row["within_bytes_per_s"]),
            "GB/s between nodes": _bandwidth(row["between_bytes_per_s"]), "collectives": row["library"],
        }
        for row in rows
    ]  # fmt: skip
    more = (
        "For N nodes, append xN: dgx-h100x32 has 256 GPUs. Or name GPUs: 8xh100, 4xh100, 1x4090. `refshard calibrate` "
        "measures a cluster of your own."
    )
    return rows, [table(cells, left=2, text=["collectives"]), Notes(sentences=[more])]


def _bandwidth(bytes_per_s: float | None) -> Quantity:
    return Quantity(None if bytes_per_s is None else bytes_per_s / 1e9, "rate")


def _hardware() -> tuple[Rows, Sequence[Block]]:
    specs = {name: load_hardware(name) for name in resources.hardware_profiles()}
    rows: list[dict[str, Any]] = [
        {
            "hardware": name, "device": spec.device_name or spec.about, "memory_bytes": spec.memory_bytes,
            "memory_bytes_per_s": spec.memory_bytes_per_s, "peak_flops_per_s": _peak(spec), "about": spec.about,
        }
        for name, spec in specs.items()
    ]  # fmt: skip
    cells: list[Row] = [
        {
            "hardware": row["hardware"], "device": row["device"], "memory": Quantity(row["memory_bytes"], "B"),
            "memory GB/s": _bandwidth(row["memory_bytes_per_s"]),
            "bf16 TFLOPS, dense": Quantity(row["peak_flops_per_s"] / 1e12, "rate"),
        }
        for row in rows
    ]  # fmt: skip
    return rows, [table(cells, left=2)]


def _peak(spec: HardwareSpec) -> float:
    return (spec.matmul.get("bf16") or spec.matmul["fp32"]).peak


def _modes() -> tuple[Rows, Sequence[Block]]:
    heads = ("mode", "parameters", "gradients", "optimizer", "storage", "gradient_storage")
    rows = [{head: str(getattr(mode, "name" if head == "mode" else head)) for head in heads} for mode in MODES.values()]
    cells = [{head.replace("_", " "): cell for head, cell in row.items()} for row in rows]
    return rows, [table(cells, left=len(heads))]


def _suites() -> tuple[Rows, Sequence[Block]]:
    earlier = earlier_launches(recorded_folders())
    rows: list[dict[str, Any]] = []
    for path in resources.suites().values():
        suite = load_suite(path)
        found = expected(suite, earlier)
        seconds = None if found.unknown else found.seconds
        rows.append({"suite": suite.name, "launches": found.launches, "expected_s": seconds, "about": suite.about})
    columns = [
        Column("suite", "left"), Column("launches"), Column("takes"), Column("what it compares", "left", wraps=True)
    ]  # fmt: skip
    times = [None if row["expected_s"] is None else format_duration(row["expected_s"]) for row in rows]
    cells = [[row["suite"], row["launches"], time or "needs GPUs", row["about"]] for row, time in zip(rows, times)]
    note = (
        "Times: recorded runs on two cores, or estimated from this machine's speed. `refshard run "
        "SUITE --list` lists a suite's cases."
    )
    return rows, [Table(columns=columns, rows=cells), Notes(sentences=[note])]


KINDS: dict[str, Callable[[], tuple[Rows, Sequence[Block]]]] = {
    "strategies": _strategies_here,
    "models": _models,
    "modes": _modes,
    "suites": _suites,
    "clusters": _clusters,
    "hardware": _hardware,
}
"""What can be listed."""
