"""Reference pages, generated from the code: suite keys with strategies and profiles, commands, and the Python API."""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

import refshard
from refshard import resources
from refshard.cli import app
from refshard.errors import STATUSES
from refshard.specs.case import Protocol
from refshard.specs.gate import GateSpec, MetricRule, TimeLimits
from refshard.specs.job import Job
from refshard.specs.reading import read_toml
from refshard.specs.suite import NetworkSpec, SuiteSpec
from refshard.strategies.table import ROWS

Spec = type[msgspec.Struct]

MEANINGS: dict[Spec, dict[str, str]] = {
    SuiteSpec: {
        "name": "The suite's name. Runs are stored in `runs/<time>-<name>`.",
        "about": "One line that tables and pages show.",
        "rounds": "Number of rounds. Each round launches every case once, in a shuffled order. At least 3 are needed "
        "for intervals and ranking.",
        "launcher": "`local` starts all ranks on this host; `netlab` joins them by an emulated network "
        "([An emulated network](../how-to/measure.md#an-emulated-network)). `--launcher` selects torchrun or Slurm.",
        "network": "The table `[network]`, below. Only with `launcher = \"netlab\"`.",
        "matrix": "One table `[matrix]` or several `[[matrix]]`. Lists are crossed; every combination is a case. Other "
        "values hold for all cases of the table. A table may have its own `rounds`.",
        "case": "What all cases share. A table's own values take precedence.",
        "gate": "Limits for `refshard gate`, below.",
        "only": "Keep only these cases, by name or by the beginning of their hash (4 or more digits).",
        "dry_run_first": "Dry-run the measured cases before anything is launched, and skip those that will not fit.",
    },
    Job: {
        "strategy": "A row of [Strategies](#strategies).",
        "gpus": "Number of GPUs; on a CPU, of ranks.",
        "model": "A model preset ([the list](#models)) or its id on Hugging Face, or a TOML file with the "
        "same keys.",
        "cluster": "A cluster profile or TOML file, `xN` for N nodes; or GPUs, `8xh100` "
        "([Name a cluster](../how-to/machines.md#name-a-cluster)). Required unless the case is measured.",
        "global_batch": "Sequences per step over all ranks. Give this, `batch_per_rank` (sequences per step and rank) "
        "or `microbatch` (sequences per microbatch and rank).",
        "seq_len": "Tokens per sequence: a number, or text with K for 2^10 (`\"8k\"`).",
        "workload": "`inference` is forward and loss under `no_grad`: no backward, no optimizer step.",
        "microbatches": "Parts of each rank's batch. Their gradients add up before one optimizer step.",
        "ep": "Ranks that divide a mixture's experts. Only plans know it.",
        "checkpointing": "Layers that keep only their input and recompute their activations in backward: `none`, "
        "`full`, `every-K` (each K-th layer), `first-N` (the first N layers of each pipeline rank), or a list of layer "
        "indices. `selective` keeps attention's output and "
        "every second matrix product's in all layers.",
        "precision": "Dtype of gathered parameters and of compute. Masters, reductions and optimizer state are fp32.",
        "tuning": "Train all parameters, LoRA adapters, or LoRA adapters on NF4 bases. Adapters need the extra "
        "`peers`.",
        "lora_rank": "Rank of the adapters.",
        "lora_targets": "Linear layers of each block that have adapters: `all-linear`, or names with commas between, "
        "such as `q_proj,v_proj`.",
        "frozen": "Parts that are not trained: `embedding`, `head` and `first-N` (the first N layers with the "
        "embedding), with commas between.",
        "optimizer": "AdamW; AdamW with 8-bit state (torchao); Muon for the matrices of the blocks and AdamW for all "
        "else; Adafactor; or SGD with a momentum of 0.9.",
        "offload": "Keep masters, gradients and optimizer state in host memory.",
        "dp_replicate": "Hybrid sharding: this many groups of ranks each shard the whole model.",
        "tp": "Ranks that split each matrix. Each such group counts as one rank for the strategy.",
        "sequence_parallel": "Under tensor parallelism: norms and the residual stream split along the sequence over "
        "the tensor ranks, and the loss along the vocabulary.",
        "cp": "Ranks that split every sequence; attention passes keys and values round in a ring. "
        "Parameters are sharded over them too.",
        "pp": "Ranks that each hold stages of layers and pass microbatches on.",
        "interleave": "Stages that a rank of a pipeline holds.",
        "schedule": "Order of a pipeline's microbatches: `1f1b`, `interleaved` (2 or more stages a rank) or "
        "`zero-bubble`.",
        "comm_memory": "Memory that FSDP2 and the engine communicate through "
        "([FSDP2's knobs](peers.md#fsdp2s-knobs)).",
    },
    Protocol: {
        "fidelity": "What is real: `measured` (everything), `emulated` (one rank of a cluster), `dryrun` (the code, on "
        "a fake GPU). Only records of earlier versions are `simulated` (closed form).",
        "resident_ranks": "Emulated cases: how many of the ranks are processes here.",
        "seed": "Seed of weights and data.",
        "data": "`synthetic`, a `.npy` file of token ids, or a text file, whose bytes are the tokens.",
        "learning_rate": "Constant learning rate, between 0 and 1.",
        "device": "`auto` takes GPUs if there are any.",
        "threads_per_rank": "CPU threads of each rank.",
        "warmup_steps": "Steps before the timed ones, at least 10. Their losses prove parity.",
        "measured_steps": "Timed steps.",
        "traced_steps": "Steps of the separate traced pass.",
        "time_limit_s": "Seconds after which a launch ends as `timeout`.",
        "memory_limit_gib": "Limit on a rank's memory until the trace begins: on a CPU the process's data, on a GPU "
        "what torch's allocator may reserve.",
    },
    NetworkSpec: {
        "hosts": "Number of hosts (network namespaces), 2 to 64.",
        "rate": "What each host can send: a whole number and `mbit` or `gbit`, such as `2gbit`.",
    },
    TimeLimits: {
        "screen_rounds": "Paired rounds that find suspects.",
        "screen_effect": "A suspect's estimated slow-down exceeds this.",
        "screen_p": "A suspect's one-sided p-value is below this.",
        "confirm_rounds": "Fresh paired rounds that decide about suspects.",
        "significance": "Level of Holm's procedure over all cases.",
        "relevant": "Slow-downs up to this never fail.",
        "visible": "A case passes only if a slow-down of this size lies outside its 95 % interval.",
    },
    MetricRule: {
        "better": "The direction that is an improvement. Without one, any change counts.",
        "tolerance": "Relative change that is still equal.",
        "gates": "If false, a change is reported and never fails.",
    },
    GateSpec: {
        "times": "The table `[gate.times]`, below.",
        "metrics": "Tables `[gate.metrics.\"<metric>\"]`, below.",
    },
}  # fmt: skip
"""What each key of a suite means, in a user's words. Types, choices and defaults are read from the specs."""

SUITE_SECTIONS: tuple[tuple[str, str, Spec], ...] = (
    ("Top level", "", SuiteSpec),
    (
        "`[case]` and `[matrix]`",
        "Every key may stand in `[case]`, or in `[matrix]` as a value or a list.",
        Job,
    ),
    ("`[case]` and `[matrix]`: how a case is run", "Every key may stand there, too.", Protocol),
    ("`[network]`", "", NetworkSpec),
    ("`[gate]`", "", GateSpec),
    ("`[gate.times]`", "Effects are relative: 0.01 is 1 %. See [Times](../how-to/ci.md#times).", TimeLimits),
    ('`[gate.metrics."<metric>"]`', "", MetricRule),
)


def suite_page() -> str:
    """Every key of a suite: type, default and meaning; then strategies, and what ships with refshard.

    Raises:
        KeyError: a key has no meaning yet; add it to :data:`MEANINGS`.
    """
    parts = [
        "# Suites, strategies and profiles\n\nEvery key of a suite's TOML file, every [strategy](#strategies), and the "
        "[models](#models), [clusters](#clusters) and [suites](#suites) that ship, generated from the code. An unknown "
        "key is an error that names the nearest known one. [Measure strategies](../how-to/measure.md) shows them in "
        "use."
    ]
    for title, introduction, spec in SUITE_SECTIONS:
        rows = [(f"`{key}`", kind, default, MEANINGS[spec][key]) for key, kind, default in _keys(spec)]
        parts.append(f"## {title}\n\n{introduction}\n\n{_table(('key', 'type', 'default', 'meaning'), rows)}")
    return "\n\n".join([*parts, _strategies(), *_profiles()])


def _keys(spec: Spec) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(spec)
    for field in (one for one in msgspec.structs.fields(spec) if one.name != "implementation"):
        if field.required:
            default = "required"
        elif isinstance(field.default, msgspec.Struct) or field.default is msgspec.NODEFAULT:
            default = ""
        else:
            default = _toml(field.default)
        yield field.name, _kind(hints[field.name]), default


def _toml(value: object) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _kind(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f'`"{choice}"`' for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(each) for each in inner if each is not type(None)))
    if origin in (tuple, list):
        return f"list of {_kind(inner[0])}s"
    if origin is dict or (inspect.isclass(hint) and issubclass(hint, msgspec.Struct)):
        return "table"
    return {str: "string", int: "integer", float: "number", bool: "true or false"}[hint]


def commands_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(app)
    found = list(_commands("refshard", root))
    rows = [(f"[`{name}`](#{name.replace(' ', '-')})", _first_sentence(command.help)) for name, command in found]
    parts = [
        "# Command line\n\nEvery command and option, generated from the program. `refshard COMMAND --help` prints the "
        "same.",
        _table(("command", ""), rows),
        "## Exit status",
        _table(("status", "of every command"), [(f"{status}", meaning) for status, meaning in STATUSES.items()]),
    ]
    return "\n\n".join(parts + [_command(name, command) for name, command in found])


def _commands(prefix: str, command: Any) -> Iterator[tuple[str, Any]]:
    subcommands: dict[str, Any] = getattr(command, "commands", {})
    for name, inner in subcommands.items():
        if getattr(inner, "commands", None):
            yield from _commands(f"{prefix} {name}", inner)
        elif not inner.hidden:
            yield f"{prefix} {name}", inner


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    usage = " ".join([name, "[OPTIONS]", *(_argument(p) for p in arguments)])
    parts = [f"## {name}", (inspect.cleandoc(command.help or "")).replace("\b", ""), f"```text\n{usage}\n```"]
    if described := [(f"`{_argument(p)}`", _text(getattr(p, "help", None))) for p in arguments]:
        parts.append(_table(("argument", ""), described))
    if options:
        rows = [(_option(p), _text(getattr(p, "help", None)), _default(p)) for p in options]
        parts.append(_table(("option", "", "default"), rows))
    return "\n\n".join(parts)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name or "").upper().strip("[]").removesuffix("...")
    many = "..." if parameter.nargs == -1 or parameter.multiple else ""
    return f"{name}{many}" if parameter.required else f"[{name}]{many}"


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted([*parameter.opts, *parameter.secondary_opts], key=len))
    takes_value = not getattr(parameter, "is_flag", False)
    return f"{names} {parameter.metavar or _value(parameter)}" if takes_value else names


def _value(parameter: Any) -> str:
    kind = getattr(parameter, "type_descriptor", None)
    name = getattr(parameter.type, "name", "text") if kind is None else kind.annotation.__name__
    return {"str": "TEXT", "int": "NUMBER", "integer": "NUMBER", "float": "NUMBER"}.get(name, name.upper())


def _default(parameter: Any) -> str:
    value = parameter.default
    plain = value is not None and not callable(value) and value is not False and value != () and value != []
    if not plain or type(value).__name__ == "Sentinel":
        return ""
    return f"`{value}`"


def _text(help_text: str | None) -> str:
    return " ".join((help_text or "").split())


def _first_sentence(help_text: str | None) -> str:
    return _text(help_text).partition(". ")[0].rstrip(".") + "."


def _strategies() -> str:
    """Every strategy, what it is, and which axes of a case it has."""
    axes = list(dict.fromkeys(axis for row in ROWS.values() for axis in sorted(row.axes)))
    rows, marks = [], []
    for name, row in ROWS.items():
        needs = ", ".join(filter(None, [*row.packages, "a CUDA device" if row.without_cuda else ""]))
        rows.append((f"`{name}`", row.about, needs))
        marks.append((f"`{name}`", *("\N{CHECK MARK}" if axis in row.axes else "" for axis in axes)))
    return (
        "## Strategies\n\nThe values of `strategy`. A case that asks for an axis that its strategy lacks ends as "
        "`unsupported`, with the reason. `refshard list strategies` also says what can run on your machine. [How each "
        "peer is called](peers.md) gives settings and reasons; names that begin with `refshard-` are modes of [the "
        "engine](../explanation/engine.md).\n\n"
        + _table(("strategy", "is", "needs"), rows)
        + "\n\nWhat each supports:\n\n"
        + _table(("strategy", *axes), marks)
    )


def _profiles() -> Iterator[str]:
    """The models, clusters, hardware and suites that ship."""
    models = [(f"`{name}`", *_model(read_toml(path))) for name, path in resources.model_profiles().items()]
    aliases = read_toml(resources.aliases())["clusters"]
    clusters = [
        (f"`{name}`", ", ".join(f"`{alias}`" for alias in aliases.get(name, ())), read_toml(path)["about"])
        for name, path in resources.cluster_profiles().items()
    ]
    hardware = [(f"`{name}`", read_toml(path)["about"]) for name, path in resources.hardware_profiles().items()]
    suites = [(f"`{name}`", read_toml(path).get("about", "")) for name, path in resources.suites().items()]
    heads = ("model", "parameters", "layers", "width", "heads", "KV heads", "vocabulary")
    yield f"## Models\n\n{_table(heads, models)}"
    yield f"## Clusters\n\n{_table(('cluster', 'also', 'is'), clusters)}"
    yield f"## Hardware\n\n{_table(('hardware', 'is'), hardware)}"
    yield f"## Suites\n\n{_table(('suite', 'measures'), suites)}"


def _model(given: dict[str, Any]) -> tuple[str, ...]:
    keys = ("params", "n_layers", "dim", "n_heads", "n_kv_heads", "vocab")
    return tuple(f"{given[key]:,}" if key in given else "" for key in keys)


def python_page() -> str:
    """The public Python API: what ``refshard.__all__`` names."""
    parts = [
        "# Python API\n\nEverything that `import refshard` offers. Torch is imported when a name is first used. "
        "[Train with the engine](../how-to/engine.md) shows it in use."
    ]
    for name in refshard.__all__:
        if name == "__version__":
            continue
        if name == "checkpoint":
            functions = ("save", "load", "full_state_dict")
            parts += [_entry(f"refshard.engine.checkpoint.{each}", f"refshard.checkpoint.{each}") for each in functions]
        else:
            parts.append(_entry(f"{refshard._HOME[name]}.{name}", f"refshard.{name}"))
    return "\n\n".join(parts)


def _entry(where: str, called: str) -> str:
    return f"::: {where}\n    options:\n      heading: {called}\n      toc_label: {called}\n      members: false"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": commands_page,
    "reference/suite.md": suite_page,
    "reference/python.md": python_page,
}
"""The generated pages by their path below docs/."""
