"""Races between streams that were reported in public, dry-run before and after their fix.

``python -m tests.races [NAME ...]`` runs scripts of ``docs/examples/races`` (by default all, in about 7 minutes) and
prints a table. The exit status is 1 if a script shows anything else than :data:`REPORTS` says.
"""

import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from refshard.dryrun.races import Conflict, Race, find_races
from refshard.dryrun.request import Request
from refshard.dryrun.run import dry_run

FOLDER = Path(__file__).parent.parent / "docs/examples/races"
HEADERS = ("report", "script", "before the fix", "after it")
HOST = "the host's own reads and writes of page-locked memory are not recorded"
Kind = tuple[Conflict, str, str]
"""How two accesses collide, the operator that the host issued first, and the other."""


class Report(NamedTuple):
    """On how many GPUs a script runs, how the reported race shows in it (None: it does not), and why it does not."""

    gpus: int
    race: Kind | None
    why: str = ""


READ, WRITE, REUSE = Conflict.READ_WRITE, Conflict.WRITE_WRITE, Conflict.REUSE
REPORTS = {
    "activation_brought_back": Report(1, (REUSE, "aten::mm", "aten::copy_")),
    "batch_overwritten_on_host": Report(1, None, HOST),
    "bucket_from_two_streams": Report(2, (WRITE, "aten::copy_", "all_reduce")),
    "bucket_overwritten": Report(2, (WRITE, "all_reduce", "aten::copy_")),
    "chunks_of_loss": Report(2, (REUSE, "aten::add", "aten::mm")),
    "cloned_after_wait": Report(1, (READ, "aten::copy_", "aten::copy_")),
    "closure_keeps_stream": Report(2, (WRITE, "aten::mm", "all_reduce")),
    "copied_while_initialised": Report(1, (READ, "aten::uniform_", "aten::copy_")),
    "filled_while_received": Report(2, None, "torch.empty does not fill memory on the fake device"),
    "freed_on_third_stream": Report(2, (REUSE, "all_reduce", "aten::mm")),
    "freed_while_sent": Report(2, (REUSE, "send", "aten::fill_")),
    "hook_on_another_stream": Report(2, (WRITE, "aten::add", "all_reduce")),
    "hook_reads_host_copy": Report(1, None, HOST),
    "parameters_from_host": Report(1, (REUSE, "aten::mm", "aten::copy_")),
    "pool_overwritten": Report(1, (READ, "aten::copy_", "aten::copy_")),
    "reduced_on_offload_stream": Report(2, (REUSE, "aten::copy_", "reduce_scatter")),
    "replaced_on_reduce_stream": Report(2, (REUSE, "reduce_scatter", "aten::mm")),
    "threads_share_a_group": Report(1, (READ, "aten::mul", "aten::copy_")),
    "waits_for_default_stream": Report(2, (READ, "aten::mm", "aten::copy_")),
    "written_by_a_fork": Report(1, None, "another process reads the memory"),
}
FOUND = {name: one for name, one in REPORTS.items() if one.race is not None}
"""16 of 20."""


def reports_of(name: str) -> list[str]:
    """The reports that a script names, as ``owner/repository#number``.

    >>> reports_of("bucket_overwritten")
    ['deepspeedai/DeepSpeed#5606']
    """
    text = (FOLDER / f"{name}.py").read_text().split('"""')[1]
    links = re.findall(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)", text)
    return [f"{repository}#{number}" for repository, number in links]


def races_of(name: str, *arguments: str) -> tuple[Race, ...]:
    """The races of a script, run with these arguments.

    Raises:
        RuntimeError: it failed, or took no optimizer step.
    """
    gpus = REPORTS[name].gpus
    command = (str(FOLDER / f"{name}.py"), *arguments)
    run = dry_run(Request(command=command, cluster="dgx-h100", world_size=gpus, local_ranks=gpus), quiet=True)
    if run.answer.outcome not in ("stepped", "ended") or not run.answer.steps_taken:
        raise RuntimeError(f"{name}: {run.answer.outcome} after {run.answer.steps_taken} steps; {run.answer.error}")
    return find_races(run.recording)


def kinds(races: Collection[Race]) -> list[Kind]:
    """The kinds of some races, each once, in order."""
    return list(dict.fromkeys((race.conflict, race.earlier.operator, race.later.operator) for race in races))


def as_reported(name: str, before: Collection[Race]) -> bool:
    """Whether the reported race is found before the fix; or nothing, where the search cannot find it."""
    race = REPORTS[name].race
    return race in kinds(before) if race is not None else not before


def _told(name: str, races: Collection[Race]) -> str:
    """What is found before the fix: the reported race first."""
    report, found = REPORTS[name], kinds(races)
    if not found:
        return f"not found: {report.why}" if report.race is None else "NOT FOUND"
    first = report.race if report.race is not None and report.race in found else found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    text = f"{first[0].value}: {first[1]}, {first[2]}{more}"
    return text if as_reported(name, races) else f"UNEXPECTED {text}"


def main(names: Sequence[str]) -> int:
    """Run some scripts, or all, and print the table."""
    if unknown := [name for name in names if name not in REPORTS]:
        print(f"there is no script '{unknown[0]}'; there are: {', '.join(REPORTS)}", file=sys.stderr)
        return 2
    rows: list[tuple[str, ...]] = []
    status = 0
    for name in names or REPORTS:
        print(f"running {name}", file=sys.stderr, flush=True)
        before, after = races_of(name), races_of(name, "--fixed")
        status = status if as_reported(name, before) and not after else 1
        rows.append((", ".join(reports_of(name)), name, _told(name, before), str(after[0]) if after else "silent"))
    print(tabulate(rows, headers=HEADERS))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
