"""Numbers in the docs: what computes them, and which of them nothing computes.

A marked value is ``<!-- value: EXPRESSION -->TEXT<!-- end -->``. EXPRESSION is Python over the names of this module
and of :mod:`tests.tables`. TEXT is its result; several lines are a Markdown table between empty lines.
``python -m tests.printed`` rewrites what has changed.
"""

import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from statistics import median
from typing import Any

from refshard.quantities import GIB, MIB, format_bytes, format_percent, format_seconds
from refshard.specs.cluster import load_cluster
from refshard.specs.hardware import load_hardware
from refshard.specs.model import load_model
from tests import tables
from tests.printed import BLOCK, ROOT, as_json, find_values

_UNIT = (
    r"(?:[KMGT]i?B(?:/s)?|[KMG]bit/s|[mun\u00b5]?s|seconds?|minutes?|hours?|%|times|x|points|tokens/s(?:/GPU)?"
    r"|TFLOPS|TFLOP/s|[TG]Hz)(?![\w/])"
)
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_MEASURED = re.compile(rf"(?<![\w.,])({_NUMBER})(?:(?: to | and | or |-)({_NUMBER}))? ?({_UNIT})")
_PART_END = re.compile(r"\n\n+|\n(?=\s*(?:[-*|]|\d+\.) )")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_CONVENTION = "95 % interval"
"""Every interval's level: a definition, not a measurement."""


@cache
def show(run: str) -> list[dict[str, Any]]:
    """The cases of a recorded run, such as ``xeon-2-cores/engine``, as ``refshard show --json`` has them."""
    rows: list[dict[str, Any]] = as_json("show", str(ROOT / "profiles" / "recorded" / run))["cases"]
    return rows


def case(run: str, strategy: str, **having: Any) -> dict[str, Any]:
    """The only case of a recorded run with this strategy and these keys."""
    wanted = {"strategy": strategy, **having}
    (found,) = (row for row in show(run) if all(row.get(key) == value for key, value in wanted.items()))
    return found


@cache
def record(path: str) -> Any:
    """A record of ``profiles/recorded`` or ``validation``, by its path from the root: JSON, JSON lines or TOML."""
    text = (ROOT / path).read_text()
    if path.endswith(".toml"):
        return tomllib.loads(text)
    return [json.loads(line) for line in text.splitlines()] if path.endswith(".jsonl") else json.loads(text)


def constant(name: str) -> Any:
    """A constant of the code: ``constant("refshard.plan.memory:FRAGMENTATION")``."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def in_cpp(name: str) -> int:
    """An integer constant of the fake device's sources."""
    sources = "".join(path.read_text() for path in (ROOT / "refshard" / "fakecuda" / "csrc").glob("*.cpp"))
    found = re.search(rf"\b{name} = (?:size_t\{{)?(\d+)\}}?(?: << (\d+))?;", sources)
    assert found is not None, name
    return int(found[1]) << int(found[2] or 0)


def percent(fraction: float, digits: int = 0) -> str:
    """``percent(0.26)`` is ``26 %``."""
    return format_percent(fraction, digits)


NAMES: dict[str, Any] = {
    **{name: value for name, value in vars(tables).items() if not name.startswith("_")},
    **{one.__name__: one for one in (show, case, record, constant, in_cpp, percent, median)},
    "size": format_bytes, "time": format_seconds, "GIB": GIB, "MIB": MIB,
    "cluster": load_cluster, "hardware": load_hardware, "model": load_model,
}  # fmt: skip


def evaluate(expression: str) -> str:
    """What a marked expression says; lines of a list are joined."""
    found = eval(expression, dict(NAMES))
    return "\n".join(found) if isinstance(found, list) else str(found)


def written(text: str) -> str:
    """A page without code blocks, generated tables and comments: what counts as its words."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    for found in find_values(text):
        if "\n" in found["text"].strip():
            text = text.replace(found[0], "")
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def words(text: str) -> int:
    """How many words a page has: outside of code blocks, generated tables and comments."""
    return len(re.findall(r"\S*\w\S*", written(text)))


def untested(text: str) -> Iterator[str]:
    """Numbers with a unit in a page's prose that nothing holds.

    A number is held if a printed block or a generated table of the page shows it, if it is a marked value, or if its
    sentence, or its row of a table, links to where it was published. Code in backticks is no prose.
    """
    blocks = [found["shown"] for found in BLOCK.finditer(text)]
    shown = " ".join(" ".join([*blocks, *(found["text"] for found in find_values(text))]).split())
    text = re.sub(r"<!-- value: .*?<!-- end -->", "`value`", text, flags=re.S)
    prose = re.sub(r"(`+)[^`].*?\1", "`", written(text), flags=re.S).replace(_CONVENTION, "")
    parts = _PART_END.split(prose)
    for sentence in chain(*([part] if part.startswith("|") else _SENTENCE_END.split(part) for part in parts)):
        if re.search(r"\]\(https?://", sentence):
            continue
        for found in _MEASURED.finditer(" ".join(sentence.split())):
            first, last, unit = found.groups()
            each = [f"{number} {unit}" for number in (first, last) if number]
            if not holds(shown, found[0]) and not all(holds(shown, one) for one in each):
                yield found[0]


def holds(shown: str, number: str) -> bool:
    """Whether a text has the number, and not as the end of a longer one."""
    return re.search(rf"(?<![\d.,]){re.escape(number)}", shown) is not None
