"""From specs to TOML that people can read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec


def to_toml(spec: msgspec.Struct) -> str:
    """``spec`` as TOML without what is as by default; reading it back gives the same spec."""
    return "\n".join(_lines(_without_defaults(spec), ())) + "\n"


def _without_defaults(spec: msgspec.Struct) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value is not None and (field.required or value != default):
            found[field.encode_name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _without_defaults(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Plain values first, then a table each for mappings; rows of a list of mappings one a line."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            yield f"{_key(key)} = ["
            yield from (f"    {_inline(row)}," for row in value)
            yield "]"
        else:
            yield f"{_key(key)} = {_inline(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key))


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return _shortest(value) if isinstance(value, float) else str(value)


def _shortest(value: float) -> str:
    """The fewest digits that read back as ``value``, with an exponent where that is large or small."""
    text = next((t for digits in range(1, 17) if float(t := f"{value:.{digits}g}") == value), repr(value))
    return text if {".", "e", "n"} & set(text) else f"{text}.0"


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)
