"""Training runs that others have published with their memory or speed: what a dry run is validated against, blind.

Settings are written down before any dry run of them, from the source and from the repository's code at that commit.
A file holds the runs of one source: what they share under ``[shared]``, the rest in ``[[runs]]``.
"""

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.specs.reading import convert, finite, read_toml, within

Half = Literal["fit", "held out"]
DEGREES = ("shard", "replicate", "tensor", "pipeline", "context")
FIGURES = ("reserved_gib", "reserved_first_step_gib", "active_gib", "tokens_per_s_gpu")


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published run: what was measured, and every setting that decides its memory.

    *Source*: ``source`` says what the page is and ``link`` where; ``run_date`` is when it ran (as near as is told).
    ``settings_written`` is when this file took the settings down. ``half`` is assigned by ``assign_halves``.
    ``seen_before``: a prototype had been run on it, so it is no blind test.

    *Code*: ``repository`` at ``commit``, started by ``entry``; ``torch`` is the version as far as it is known.

    *Figures*, of one rank: peak reserved memory in GiB from the second step on, or of the first step alone; peak active
    memory in GiB; tokens a second a GPU, within ``tokens_per_s_gpu_spread`` to either side. At least one is given.

    *Hardware*: names of profiles. ``capacity_gib`` is the GPU's memory as torch logged it.

    *Parallelism*: ``local_batch`` sequences of ``seq_len`` tokens on each data-parallel rank a step; the five degrees
    multiply to ``gpus`` (``expert`` lies within ``shard``). ``reshard_after_forward`` is of the blocks ("but last": all
    but the last); ``units`` says what else is wrapped.

    *Step*: ``checkpointing`` is "none", "full", "op" (torchtitan's selective policy by operator) or "every 2" (every
    second block); ``compiled`` names the parts that torch.compile compiles. Parameters, gradients and optimizer state
    are stored in ``parameter_dtype``. ``logits_fp32`` is where logits are cast, ``logits_kept`` whether a reference to
    them lives through backward. ``attention`` is the kernel that those settings choose on that GPU and torch. ``norm``
    is made of "operators", torch's "rms_norm" or a "triton" kernel.

    *Allocator*: ``allocator_setting`` is the variable as the launcher sets it; ``expandable_segments`` is what came of
    it, None where that cannot be told. ``record_streams``: collectives hold memory by ``record_stream``.

    *Honesty*: ``assumed`` names each field that the source does not tell, filled in by the repository's default at that
    commit; ``depends_on_data`` says that memory or time depends on the tokens; ``notes`` says the rest.
    """

    source: str
    link: str
    run_date: datetime.date
    settings_written: datetime.date
    half: Half
    seen_before: bool = False

    repository: str
    commit: str
    entry: str
    torch: str = ""

    reserved_gib: float | None = None
    reserved_first_step_gib: float | None = None
    active_gib: float | None = None
    tokens_per_s_gpu: float | None = None
    tokens_per_s_gpu_spread: float = 0.0

    hardware: str
    cluster: str
    gpus: int
    capacity_gib: float | None = None

    model: str
    seq_len: int
    local_batch: int
    strategy: Literal["fsdp1", "fsdp2", "single"]
    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    reshard_after_forward: Literal["all", "but last", "none", ""] = ""
    units: str = ""
    loss_parallel: bool = False

    checkpointing: Literal["none", "op", "every 2", "full"]
    compiled: tuple[Literal["attention", "loss", "blocks"], ...] = ()
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    compute_dtype: Literal["fp32", "bf16"] = "bf16"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer: Literal["adamw"] = "adamw"
    optimizer_implementation: Literal["foreach", "fused"]
    loss: Literal["cross entropy", "chunked cross entropy"] = "cross entropy"
    logits_fp32: Literal["in the model", "in the loss"]
    logits_kept: bool
    attention: Literal["flash", "efficient", "cudnn", "flex"]
    norm: Literal["operators", "rms_norm", "triton"]

    expandable_segments: bool | None
    allocator_setting: str = ""
    record_streams: bool = False

    assumed: tuple[str, ...] = ()
    depends_on_data: bool = False
    notes: str = ""

    def __post_init__(self) -> None:
        self._check_source()
        self._check_figures()
        for field in ("gpus", "seq_len", "local_batch", "expert", *DEGREES):
            within(field, getattr(self, field), 1)
        degrees = {field: getattr(self, field) for field in DEGREES}
        if prod(degrees.values()) != self.gpus:
            raise ValueError(f"gpus must be the product of {', '.join(DEGREES)}, got {self.gpus} and {degrees}")
        if self.shard % self.expert:
            raise ValueError(f"expert must divide shard = {self.shard}, got {self.expert}")
        if self.strategy != "single" and not self.reshard_after_forward:
            raise ValueError(f"reshard_after_forward must be given for {self.strategy}, got nothing; add it")

    def _check_source(self) -> None:
        for field in ("source", "repository", "commit", "entry"):
            if not getattr(self, field).strip():
                raise ValueError(f"{field} must say something, got nothing")
        if not self.link.startswith("https://"):
            raise ValueError(f"link must begin with https://, got {self.link!r}")
        if self.run_date > self.settings_written:
            raise ValueError(f"run_date must not be after settings_written, got {self.run_date}")
        if self.seen_before and self.half != "fit":
            raise ValueError(f"half must be 'fit' for a run that was seen before, got {self.half!r}")
        for name in self.assumed:
            if name not in self.__struct_fields__:
                raise ValueError(
                    f"assumed has the unknown field '{name}'; {nearest(name, list(self.__struct_fields__))}"
                )

    def _check_figures(self) -> None:
        given = {field: getattr(self, field) for field in FIGURES if getattr(self, field) is not None}
        if not given:
            raise ValueError(f"reserved_gib or another figure must be given ({', '.join(FIGURES)}), got none")
        for field, value in given.items():
            finite(field, value, above=0)
        finite("tokens_per_s_gpu_spread", self.tokens_per_s_gpu_spread)
        if self.capacity_gib is not None:
            finite("capacity_gib", self.capacity_gib, above=max(self.reserved_gib or 0, self.active_gib or 0))

    @property
    def step_s(self) -> float | None:
        """Seconds a step, from the published tokens a second; None where none are published."""
        if self.tokens_per_s_gpu is None:
            return None
        share = self.tensor * self.pipeline * self.context
        return self.local_batch * self.seq_len / (self.tokens_per_s_gpu * share)


def assign_halves(runs: Mapping[str, PublishedRun]) -> dict[str, Half]:
    """The rule by which runs are split, before any of them is run.

    Constants of step time may be fitted on "fit" runs only. Runs that a prototype had seen are "fit". Runs without a
    published speed are "held out", since nothing is fitted on them. The rest is split by source, so that runs that
    differ little stay together: the links of one accelerator, written down on one day, are sorted and alternate, "held
    out" first. Runs that are added later therefore leave earlier ones where they are.
    """
    halves: dict[str, Half] = {}
    groups: dict[tuple[str, datetime.date], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, run in runs.items():
        if run.seen_before or run.tokens_per_s_gpu is None:
            halves[name] = "fit" if run.seen_before else "held out"
        else:
            groups[run.hardware, run.settings_written][run.link].append(name)
    for group in groups.values():
        for place, link in enumerate(sorted(group)):
            halves.update(dict.fromkeys(group[link], "fit" if place % 2 else "held out"))
    return halves


def load_published_runs(paths: Sequence[Path] | None = None) -> dict[str, PublishedRun]:
    """Every published run by name, of the files that ship with refshard or of ``paths``.

    Raises:
        SpecError: a file is not valid, or two runs have one name.
    """
    runs: dict[str, PublishedRun] = {}
    for path in list(resources.published_runs().values()) if paths is None else paths:
        for name, run in read_source(path).items():
            if name in runs:
                raise SpecError(f"{path}: the name '{name}' is taken by another file's run; give it another")
            runs[name] = run
    return runs


def read_source(path: Path) -> dict[str, PublishedRun]:
    """The runs of one file, by name. Notes of a run follow the shared ones, and so do its assumed fields.

    Raises:
        SpecError: the file is not valid, or two of its runs have one name.
    """
    table = read_toml(path)
    if unknown := next((key for key in table if key not in ("shared", "runs")), None):
        raise SpecError(f"{path}: unknown key '{unknown}'; {nearest(unknown, ['shared', 'runs'])}")
    shared: dict[str, Any] = table.get("shared", {})
    runs: dict[str, PublishedRun] = {}
    for own in table.get("runs", []):
        name = own.get("name", "")
        if not name or name in runs:
            raise SpecError(f"{path}: name must be given once for each of runs, got {name!r}")
        merged = shared | {key: value for key, value in own.items() if key != "name"}
        merged["notes"] = " ".join(part["notes"] for part in (shared, own) if part.get("notes"))
        merged["assumed"] = [*shared.get("assumed", []), *own.get("assumed", [])]
        runs[name] = convert(merged, PublishedRun, where=f"published run {name}")
    return runs
