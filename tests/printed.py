"""Blocks of text in the docs that show what a command prints.

A comment before the block names the command, and which paragraphs of its output the block shows (by default all)::

    <!-- prints 1,3-4,last: refshard show profiles/recorded/xeon-2-cores/engine -->

``python -m tests.printed`` runs the commands and rewrites the blocks that have changed. Commands that take long are
marked ``slow``, as in ``prints 2 slow:``; ``--slow`` rewrites these too. ``--list 'refshard ...'`` numbers a command's
paragraphs. Marked values and generated tables (:mod:`tests.values`) are rewritten as well.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from refshard.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"<!-- prints(?P<parts> (?:[\d,-]|last)+)?(?P<slow> slow)?: refshard (?P<command>.+?) -->"
    r"\n+```text\n(?P<shown>.*?)\n```",
    re.S,
)
_VALUE = re.compile(r"<!-- value: (?P<expression>.+?) -->(?P<text>.*?)<!-- end -->", re.S)


@dataclass(frozen=True, slots=True)
class Printed:
    """One block: where it is, what it shows, and the command that prints it."""

    page: Path
    parts: str
    slow: bool
    command: str
    shown: str

    def expected(self) -> str:
        """What the block should show."""
        paragraphs = paragraphs_of(self.command, as_process=self.slow)
        return "\n\n".join(paragraphs[number - 1] for number in _numbers(self.parts, len(paragraphs)))


def printed(page: Path) -> Iterator[Printed]:
    """The marked blocks of a page."""
    for found in BLOCK.finditer(page.read_text()):
        parts, slow = (found["parts"] or "").strip(), found["slow"] is not None
        yield Printed(page, parts, slow, found["command"], found["shown"])


def find_values(text: str) -> Iterator[re.Match[str]]:
    """The marked values in a page's text: ``expression`` and ``text``."""
    return _VALUE.finditer(text)


def same(shown: str, expected: str) -> bool:
    """Whether two texts are equal but for how long something took here."""
    return _timeless(shown) == _timeless(expected)


@cache
def paragraphs_of(command: str, *, as_process: bool) -> list[str]:
    """What ``refshard COMMAND`` prints, cut at blank lines. Dry runs need a process."""
    if as_process:
        call = [sys.executable, "-m", "refshard", *command.split()]
        text = subprocess.run(call, cwd=ROOT, capture_output=True, text=True).stdout
    else:
        text = CliRunner().invoke(app, command.split()).stdout
    return [part.rstrip() for part in re.split(r"\n\n+", text.strip("\n"))]


def as_json(*words: str) -> dict[str, Any]:
    """What ``refshard WORDS --json`` prints."""
    made = CliRunner().invoke(app, [*words, "--json"])
    assert made.exit_code in (0, 3), made.output
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def _numbers(parts: str, count: int) -> list[int]:
    if not parts:
        return list(range(1, count + 1))
    found: list[int] = []
    for part in parts.replace("last", str(count)).split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _timeless(text: str) -> str:
    return re.sub(r"[\d.]+ s on this machine", "", text)


def rewrite(page: Path, *, slow: bool) -> bool:
    """Bring a page's blocks and values up to date; whether one has changed."""
    from tests.values import evaluate

    def renewed(found: re.Match[str]) -> str:
        value = evaluate(found["expression"])
        text = f"\n\n{value}\n\n" if "\n" in value else value
        return f"<!-- value: {found['expression']} -->{text}<!-- end -->"

    text = _VALUE.sub(renewed, page.read_text())
    for block in printed(page):
        if slow or not block.slow:
            expected = block.expected()
            if not same(block.shown, expected):
                text = text.replace(f"\n```text\n{block.shown}\n```", f"\n```text\n{expected}\n```", 1)
    changed = text != page.read_text()
    if changed:
        page.write_text(text)
    return changed


if __name__ == "__main__":
    if "--list" in sys.argv:
        for place, part in enumerate(paragraphs_of(sys.argv[-1].removeprefix("refshard "), as_process=True), start=1):
            print(f"[{place}]\n{part}\n")
    else:
        for path in PAGES:
            if rewrite(path, slow="--slow" in sys.argv):
                print(path.relative_to(ROOT))
