"""``python -m tests.distributed.cases``: how each case ends in each mode, and in FSDP2, as a table."""

import argparse
import sys
import time
from collections import Counter
from typing import get_args

from refshard.engine.placement import MODES
from tests.distributed.cases import fsdp2
from tests.distributed.cases.case import Case
from tests.distributed.cases.corpus import CASES
from tests.distributed.cases.run import FSDP2, Device, Outcome, Run, run_all

_SHORT = {
    "right": ".", "refused": "refused", "obscure": "OBSCURE", "wrong": "WRONG", "race": "RACE", "crash": "CRASH",
    "hang": "HANG",
}  # fmt: skip


def main() -> None:
    """Run what the arguments ask for, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.cases", description=__doc__)
    parser.add_argument("--modes", nargs="+", default=[FSDP2, *MODES], choices=[FSDP2, *MODES])
    parser.add_argument("--only", default="", help="cases with this in their name or theme")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--device", choices=get_args(Device), default="cpu", help="fake-cuda also watches streams for races"
    )
    parser.add_argument("--variants", action="store_true", help="also with evaluation and checkpointing")
    parser.add_argument("--table", action="store_true", help="only the cases that stand for a row of the issues")
    parser.add_argument("--quiet", action="store_true", help="no messages")
    parser.add_argument("--unexpected", action="store_true", help="only what no case allows")
    chosen = parser.parse_args()
    cases = [
        c
        for c in CASES.values()
        if chosen.only in f"{c.theme}.{c.name}"
        and (c.table or not chosen.table)
        and not (c.only_on_cpu and chosen.device != "cpu")
    ]
    runs = [
        Run(c.name, way, variant)
        for c in cases
        for variant in (c.variants if chosen.variants else c.variants[:1])
        for way in chosen.modes
        if way in (FSDP2, *c.modes)
    ]
    began = time.monotonic()
    done: list[Run] = []

    def report(run: Run, outcome: Outcome) -> None:
        done.append(run)
        if outcome.kind in ("crash", "hang") or len(done) == len(runs):
            print(f"{len(done)} of {len(runs)} runs: {run.case} in {run.way}: {outcome.kind}", file=sys.stderr)

    outcomes = run_all(chosen.world_size, runs, device=chosen.device, report=report)
    _print(outcomes, chosen.modes, quiet=chosen.quiet, unexpected=chosen.unexpected)
    print(f"{len(cases)} cases, {len(runs)} runs on {chosen.world_size} ranks in {time.monotonic() - began:.0f} s")


def _allowed(case: Case, run: Run, outcome: Outcome) -> bool:
    if run.way == FSDP2:
        return outcome.kind == fsdp2.expected(case.name)
    return case.accepts(run.way, outcome.kind, outcome.message)


def _print(outcomes: dict[Run, Outcome], ways: list[str], *, quiet: bool, unexpected: bool) -> None:
    print(f"{'case':<58}" + "".join(f"{way:<11}" for way in ways))
    counts: dict[str, Counter[str]] = {way: Counter() for way in ways}
    for name, variant in dict.fromkeys((run.case, run.variant) for run in outcomes):
        row = {way: outcomes[Run(name, way, variant)] for way in ways if Run(name, way, variant) in outcomes}
        for way, outcome in row.items():
            counts[way][outcome.kind] += 1
            counts[way]["not as wanted"] += not _allowed(CASES[name], Run(name, way, variant), outcome)
        surprising = {w: o for w, o in row.items() if not _allowed(CASES[name], Run(name, w, variant), o)}
        if unexpected and not surprising:
            continue
        title = name if variant.name == "plain" else f"{name} [{variant.name}]"
        cells = (_SHORT[row[way].kind] + "!" * (way in surprising) if way in row else "-" for way in ways)
        print(f"{title:<57} " + "".join(f"{cell:<11}" for cell in cells).rstrip())
        if not quiet:
            messages: dict[str, list[str]] = {}
            for way, outcome in row.items():
                for message in (outcome.message, *outcome.warned):
                    if message:
                        messages.setdefault(message, []).append(way)
            for message, told_by in messages.items():
                print(f"      {', '.join(told_by)}: {message}")
    print()
    for kind in (*_SHORT, "not as wanted"):
        print(f"{kind:<58}" + "".join(f"{counts[way][kind]:<11}" for way in ways))


if __name__ == "__main__":
    main()
