"""Names as people type them: ``H100``, ``rtx4090``, ``meta-llama/Llama-3.1-8B-Instruct``.

Spellings that differ only in case, separators, a vendor's words or a release's suffixes are one name. Further names of
profiles are listed in ``profiles/aliases.toml``.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

from refshard import resources
from refshard.specs.reading import read_toml

Kind = Literal["clusters", "models"]
_VENDORS = frozenset(("nvidia", "amd", "geforce", "instinct", "tesla"))
_RELEASES = re.compile(r"meta|instruct|base|chat|hf|it|pt|thinking|\d{4}")
"""Parts of a model's name on Hugging Face that do not change its dimensions."""


def spelled_alike(kind: Kind, name: str) -> str:
    """What all spellings of a name have in common.

    >>> spelled_alike("clusters", "NVIDIA GeForce RTX 4090"), spelled_alike("clusters", "rtx-4090")
    ('rtx4090', 'rtx4090')
    >>> spelled_alike("models", "Qwen/Qwen3-30B-A3B-Instruct-2507"), spelled_alike("models", "qwen3-30b-a3b")
    ('qwen330ba3b', 'qwen330ba3b')
    """
    parts = re.split(r"[-_\s]+", name.lower().rpartition("/")[2] if kind == "models" else name.lower())
    return "".join(part for part in parts if not _without_meaning(kind, part))


def _without_meaning(kind: Kind, part: str) -> bool:
    return part in _VENDORS if kind == "clusters" else _RELEASES.fullmatch(part) is not None


def profile_called(kind: Kind, name: str, profiles: Iterable[str]) -> str | None:
    """The profile that ``name`` stands for; None if it stands for none."""
    return _known(kind, profiles).get(spelled_alike(kind, name))


def closest(kind: Kind, readings: Iterable[tuple[str, str]], profiles: Iterable[str]) -> str:
    """The remedy for an unknown name: the closest of all known ones to the first reading that has one; or where they
    are listed. A reading is a name and what surrounds it, as ``("h10", "8x{}")``.
    """
    spellings = {spelled_alike(kind, alias): alias for alias in (*_aliases(kind), *profiles)}
    for name, around in readings:
        if close := get_close_matches(spelled_alike(kind, name), spellings, n=1):
            return f"did you mean '{around.format(spellings[close[0]])}'?"
    return f"refshard list {kind} shows all"


def is_alias(kind: Kind, name: str) -> bool:
    """Whether it is another name of a profile, rather than another spelling of its own."""
    return spelled_alike(kind, name) in {spelled_alike(kind, alias) for alias in _aliases(kind)}


def _known(kind: Kind, profiles: Iterable[str]) -> dict[str, str]:
    """The profile of each spelling."""
    known = {spelled_alike(kind, alias): profile for alias, profile in _aliases(kind).items()}
    return known | {spelled_alike(kind, profile): profile for profile in profiles}


def _aliases(kind: Kind) -> dict[str, str]:
    """The profile of each further name."""
    return {
        alias: profile for profile, names in read_toml(resources.aliases()).get(kind, {}).items() for alias in names
    }
