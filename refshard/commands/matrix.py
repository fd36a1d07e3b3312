"""A suite from the command line: options alone, a file, standard input, or a file whose keys options replace."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from refshard.errors import SpecError
from refshard.folders import replace_file
from refshard.quantities import parse_counts
from refshard.specs.case import check_keys
from refshard.specs.reading import convert, read_as
from refshard.specs.suite import BATCH_KEYS, CASE_KEYS, SuiteSpec, find_suite, load_suite, parse_suite
from refshard.specs.writing import to_toml

_SUITE_KEYS = ("name", "about", "rounds", "launcher", "dry_run_first")
_TEXTS = ("name", "about")
"""Keys with values that may hold commas."""
_DEFAULTS: dict[str, Any] = {"model": "llama-tiny", "gpus": 2, "batch_per_rank": 1}
"""What options alone leave open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that describe a suite: keys of cases with their values as text, several with commas, ``changes`` as
    ``key=value``.
    """

    keys: Mapping[str, str | None] = field(default_factory=dict)
    rounds: int | None = None
    changes: Sequence[str] = ()

    @property
    def given(self) -> bool:
        """Whether any was given."""
        return bool(self.changes) or self.rounds is not None or any(one is not None for one in self.keys.values())


def chosen_suite(suite: str | None, options: Options) -> SuiteSpec | None:
    """The suite that is named, with the options' keys in place of its own; without a name, one of the options alone;
    None without either. ``-`` reads TOML from standard input.

    Raises:
        SpecError: there is no such suite, or a key or a value is wrong.
    """
    base = None if suite is None else _read(suite)
    if not options.given:
        return base
    keys = _changes(options)
    top = {key: keys.pop(key) for key in _SUITE_KEYS if key in keys}
    if base is None:
        if "strategy" not in keys:
            raise SpecError("strategy: none given; add --strategy ddp,fsdp2, or name a suite")
        matrix = {**_defaults(keys), **keys}
        return convert({"name": "command-line", **top, "matrix": matrix}, SuiteSpec, where="command line")
    tables = [_replaced(table, keys, top) for table in base.tables]
    built = {**msgspec.to_builtins(base), "matrix": tables if len(tables) > 1 else tables[0], **top}
    return convert(built, SuiteSpec, where="command line")


def keep(suite: SuiteSpec, path: Path) -> None:
    """Write the suite as TOML that ``refshard run`` takes.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        replace_file(path, [to_toml(suite)])
    except OSError as error:
        raise SpecError(f"write: {path} cannot be written ({error.strerror}); name a writable file") from None


def _read(name: str) -> SuiteSpec:
    return parse_suite(sys.stdin.read(), "standard input") if name == "-" else load_suite(find_suite(name))


def _changes(options: Options) -> dict[str, Any]:
    """Keys and their values, those of ``--set`` last."""
    keys: dict[str, Any] = {}
    for key, given in options.keys.items():
        if given is not None:
            keys[key] = _values(key, given)
    if options.rounds is not None:
        keys["rounds"] = options.rounds
    for change in options.changes:
        key, equals, given = change.partition("=")
        key = key.strip()
        if not equals or not given.strip():
            raise SpecError(f"set: '{change}' given; write key=value, such as seq_len=512")
        check_keys("set", [key], (*CASE_KEYS, *_SUITE_KEYS))
        keys[key] = _values(key, given)
    return keys


def _values(key: str, given: str) -> Any:
    """One value, or a list of those between commas.

    >>> _values("seq_len", "512,1024"), _values("checkpointing", "[0, 5]"), _values("about", "small, fast")
    ([512, 1024], [[0, 5]], 'small, fast')
    """
    if key in _TEXTS:
        return given
    if given.strip().startswith("["):
        return [_value(given)]
    if ".." in given and key == "gpus":
        return read_as(parse_counts, key, given)
    words = [word.strip() for word in given.split(",")]
    if "" in words:
        raise SpecError(f"{key}: '{given}' has an empty value; separate values by single commas")
    found = [_value(word) for word in words]
    return found if len(found) > 1 else found[0]


def _value(word: str) -> Any:
    """As TOML has it; what TOML does not know is text."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def _defaults(keys: dict[str, Any]) -> dict[str, Any]:
    """Without a batch if one is given."""
    return {key: value for key, value in _DEFAULTS.items() if key not in BATCH_KEYS or not keys.keys() & BATCH_KEYS}


def _replaced(table: dict[str, Any], keys: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """A table with the keys in place of its own and the shared ones; a batch replaces either kind of batch, and
    what is at the ``top`` of the suite its own.
    """
    sizes = set(BATCH_KEYS)
    gone = {*keys, *top, *(sizes if sizes & keys.keys() else ())}
    return {**{key: value for key, value in table.items() if key not in gone}, **keys}
