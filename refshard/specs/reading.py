"""From TOML and plain data to specs, with errors that name the field, the value and the remedy."""

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from refshard.errors import SpecError, nearest

LARGEST = 2**40
"""Above what any count, limit or size in a suite can mean."""
T = TypeVar("T")


def convert(data: Mapping[str, Any], to: type[T], *, where: str, strict: bool = True) -> T:
    """Build the spec ``to`` from plain data; unless ``strict``, numbers may be given as text.

    Raises:
        SpecError: with the field, the value and the remedy in one line.
    """
    try:
        return msgspec.convert(data, to, strict=strict)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}: {_explain(str(error), data, to)}") from None


def _explain(message: str, data: Mapping[str, Any], to: type) -> str:
    text, _, path = message.partition(" - at `$")
    keys = re.findall(r"[\w-]+", path.rstrip("`").replace("...", ""))
    if unknown := re.search(r"unknown field `(.+)`", text):
        fields: list[str] = list(getattr(_struct_at(to, keys), "__struct_fields__", ()))
        where = f"{'.'.join(keys)} has the " if keys else ""
        return f"{where}unknown key '{unknown[1]}'; {nearest(unknown[1], fields)}"
    if missing := re.search(r"missing required field `(.+)`", text):
        return f"{'.'.join([*keys, missing[1]])} is missing; add it"
    if not keys or text[0].islower():  # a rule of our own, which begins with the field's name and gives the value
        return ".".join([*keys, text])
    value: Any = data
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value.get(key)
    if "enum value" in text:
        names = [key for key in keys if not key.isdigit()]
        text = f"{text}; known: {', '.join(_choices(get_type_hints(_struct_at(to, names[:-1]))[names[-1]]))}"
    return f"{'.'.join(keys)}: {text[0].lower()}{text[1:]} (got {value!r})"


def _struct_at(to: type, keys: list[str]) -> type:
    """The struct to which ``keys`` lead from the struct ``to``, by way of optional fields too."""
    for key in keys:
        if key.isdigit():
            continue  # a place in a list: all items are of one kind
        hint = get_type_hints(to)[key]
        to = next((t for t in (hint, *get_args(hint)) if isinstance(t, type) and issubclass(t, msgspec.Struct)), to)
    return to


def _choices(hint: Any) -> list[str]:
    """The words that a hint allows, wherever in it they stand."""
    return [hint] if isinstance(hint, str) else [word for inner in get_args(hint) for word in _choices(inner)]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        SpecError: it cannot be read, or is no TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not valid TOML ({error}); correct that line") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Decode TOML; ``where`` it comes from is for messages.

    Raises:
        SpecError: it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not valid TOML ({error}); correct that line") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        SpecError: it cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except ValueError as error:
        raise SpecError(f"{path}: not valid JSON ({error}); correct that line") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: must hold a JSON object, got a {type(data).__name__}; give a model's config.json")
    return data


def read_as(parse: Callable[[str], T], field: str, given: str) -> T:
    """What :mod:`refshard.quantities` reads in the text ``given`` to ``field``.

    Raises:
        SpecError: it cannot be read; the message names the field.
    """
    try:
        return parse(given)
    except ValueError as error:
        raise SpecError(f"{field} {error}") from None


def within(field: str, value: int, least: int, *, most: int = LARGEST) -> None:
    """Check that ``value`` lies between ``least`` and ``most``.

    Raises:
        ValueError: it does not; the message names the field.
    """
    if value < least:
        raise ValueError(f"{field} must be >= {least}, got {value}")
    if value > most:
        raise ValueError(f"{field} must be <= {most}, got {value}")


def finite(field: str, value: float, *, above: float | None = None) -> None:
    """Check that ``value`` is a number >= 0, or > ``above`` where that is given, and not infinite.

    Raises:
        ValueError: it is not (nor is NaN); the message names the field.
    """
    if above is None and not 0 <= value < math.inf:
        raise ValueError(f"{field} must be >= 0 and finite, got {value}")
    if above is not None and not above < value < math.inf:
        raise ValueError(f"{field} must be > {above:g} and finite, got {value}")


def sourced(spec: msgspec.Struct, *, exempt: Sequence[str]) -> None:
    """Check that ``spec.sources`` names every field that is not its default, and no other; ``exempt`` need none.

    Raises:
        ValueError: a field has no source, or a source no field.
    """
    sources: dict[str, str] = spec.sources  # type: ignore[attr-defined]
    fields = msgspec.structs.fields(spec)
    if unknown := next((name for name in sources if name not in spec.__struct_fields__), None):
        raise ValueError(f"sources has the unknown key '{unknown}'; {nearest(unknown, list(spec.__struct_fields__))}")
    for field in fields:
        default = field.default_factory() if callable(field.default_factory) else field.default
        given = getattr(spec, field.name) != default
        if given and field.name not in exempt and not sources.get(field.name, "").strip():
            raise ValueError(f"sources must say where {field.name} comes from, got nothing; add it")


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
