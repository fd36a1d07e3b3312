"""``refshard gate -- train.py``: a dry run of a script, compared with accepted figures or with another revision."""

import contextlib
import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from refshard import resources
from refshard.analysis.exact import Value, changes
from refshard.commands.dryrun import Options as DryRunOptions
from refshard.commands.dryrun import trial_of
from refshard.commands.gate import Outputs, put_out
from refshard.commands.printing import tell
from refshard.dryrun.analyse import analyse
from refshard.dryrun.exact import by_module, differing, exact_figures
from refshard.dryrun.run import dry_run
from refshard.dryrun.trials import Trial
from refshard.errors import SpecError, StoreError
from refshard.folders import replace_file
from refshard.measure.gate import folder_of, root_of
from refshard.quantities import format_bytes
from refshard.records import timestamp
from refshard.report.blocks import Answer
from refshard.report.gate.formats import GateCase, GateReport
from refshard.specs.cluster import cluster_name
from refshard.specs.gate import RULES
from refshard.version import __version__

_SHOWN = 5
Modules = Mapping[str, tuple[int, int]]
"""Operators of a step, and bytes at the peak, by module."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to dry-run: the ``words`` of the command, on ``gpus`` GPUs of ``cluster``. It is compared with the
    ``baseline``, a revision of the repository that it is in or a folder, else with what was accepted; ``accept`` is the
    reason for which the figures of this run are accepted.
    """

    words: tuple[str, ...]
    cluster: str
    gpus: int | None = None
    baseline: str | None = None
    accept: str | None = None
    baselines: Path = resources.BASELINES


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of a command, and who accepted them when: the file next to the baselines of suites."""

    command: str
    cluster: str
    gpus: int
    torch: str
    refshard: str
    accepted_at: str
    reason: str
    figures: dict[str, Value]
    modules: dict[str, tuple[int, int]]


def gate_script(options: Options, outputs: Outputs) -> Answer:
    """Compare, or accept; the status is that of ``refshard gate``.

    Raises:
        SpecError: the command, the cluster, the revision or the reason is wrong.
        RefshardError: the script's process ended without an answer.
    """
    if options.accept is not None and (options.baseline is not None or not options.accept.strip()):
        raise SpecError("accept needs a reason, and no baseline revision: it accepts the figures of this run")
    options = msgspec.structs.replace(options, cluster=cluster_name(options.cluster))
    _trial(options)
    file = _file(options)
    if options.accept is None and options.baseline is None and not file.exists():
        remedy = f"refshard gate --accept REASON --cluster {options.cluster} -- {shlex.join(options.words)}"
        missing = f"no baseline for this command ({file} does not exist); accept its figures: {remedy}"
        return put_out(GateReport(baseline="accepted", candidate=".", mismatch=missing), outputs)
    now = _figures(options)
    if options.accept is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        accepted = msgspec.structs.replace(now, reason=options.accept)
        replace_file(file, [msgspec.json.format(msgspec.json.encode(accepted), indent=1).decode(), "\n"])
        return put_out(_report(options, accepted, now, f"accepted: {file}"), outputs)
    before = _read(file) if options.baseline is None else _figures_of(options.baseline, options)
    if before.torch != now.torch:
        other = f"the baseline is of torch {before.torch}, this is {now.torch}; accept the figures anew with --accept"
        return put_out(GateReport(baseline="accepted", candidate=".", mismatch=other), outputs)
    return put_out(_report(options, before, now), outputs)


def _report(options: Options, before: Accepted, now: Accepted, *notes: str) -> GateReport:
    name = shlex.join(options.words)
    found = changes({name: before.figures}, {name: now.figures}, RULES)
    about = (f"accepted on {before.accepted_at[:10]}: {before.reason}",) if before.reason and not notes else ()
    report = GateReport(
        baseline=options.baseline or "accepted", candidate=".", cases=(GateCase(name=name, changes=found),),
        must_accept=options.baseline is None, notes=(*about, *notes, *_accounts(before.modules, now.modules)),
    )  # fmt: skip
    if report.outcome != "regression" or options.baseline is not None:
        return report
    remedy = f"if the change is intended, repeat the command with --accept REASON, and commit {_file(options)}"
    return replace(report, notes=(*report.notes, remedy))


def _accounts(before: Modules, now: Modules) -> list[str]:
    """The modules with the largest differences in memory at the peak and in operators."""
    found = differing(before, now, (0, 0), lambda was, is_: (abs(is_[1] - was[1]), abs(is_[0] - was[0])))
    lines = []
    for module, was, is_ in found[:_SHOWN]:
        peak = f"{format_bytes(was[1])} at the peak became {format_bytes(is_[1])}" if was[1] != is_[1] else ""
        operators = f"{was[0]:,} operators became {is_[0]:,}" if was[0] != is_[0] else ""
        lines.append(f"{module or 'outside of modules'}: {', '.join(filter(None, (peak, operators)))}")
    return [*lines, *([f"{len(found) - _SHOWN} more modules differ"] if len(found) > _SHOWN else [])]


def _trial(options: Options) -> Trial:
    return trial_of(DryRunOptions(words=options.words, cluster=options.cluster, gpus=options.gpus))


def _figures(options: Options) -> Accepted:
    """Dry-run the command in the current folder."""
    trial = _trial(options)
    found = analyse(dry_run(trial.request, quiet=True), trial.cluster)
    answer = found.run.answer
    if answer.outcome == "failed":
        raise SpecError(f"gate: the script failed: {answer.error}" + (f" at {answer.where}" if answer.where else ""))
    if found.fits is None:
        raise SpecError(
            "gate: no optimizer step had work on the GPU; give the script the arguments with which it trains"
        )
    return Accepted(
        command=shlex.join(options.words), cluster=options.cluster, gpus=trial.request.world_size,
        torch=found.run.answer.torch, refshard=__version__, accepted_at=timestamp(), reason="",
        figures=exact_figures(found), modules={name: use[:2] for name, use in by_module(found).items()},
    )  # fmt: skip


def _figures_of(revision: str, options: Options) -> Accepted:
    """Dry-run the command as another revision has it, from the same folder within the repository."""
    here = Path.cwd()
    if (root := root_of(here)) is None:
        raise SpecError(f"baseline: {here} is in no git repository; name a folder, or leave --baseline out")
    if inside := [word for word in options.words if Path(word).is_absolute() and Path(word).is_relative_to(root)]:
        raise SpecError(f"baseline: {inside[0]} is this revision's own file; give its path relative to {here}")
    with folder_of(revision, root) as folder:
        there = folder / here.resolve().relative_to(root.resolve())
        if not there.is_dir():
            raise SpecError(f"baseline: '{revision}' has no folder {there.relative_to(folder)}; run the gate elsewhere")
        tell(f"dry run of {revision}")
        with contextlib.chdir(there):
            return _figures(options)


def _file(options: Options) -> Path:
    words = [word for word in options.words if not word.startswith("-")]
    stem = re.sub(r"[^\w.-]+", "-", Path(words[0]).stem if words else "command")
    identity = "\0".join((*options.words, options.cluster, str(options.gpus)))
    return options.baselines / "scripts" / f"{stem}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.json"


def _read(file: Path) -> Accepted:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Accepted)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{file} is no baseline of a script ({error}); accept its figures anew") from None
