"""Take a recording from the device, and keep it in a file."""

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from refshard.dryrun.recording import Group, Recording

_TABLES = ("name_table", "signature_table", "module_table", "site_table")


def collect(ext: ModuleType, rank: int, world_size: int) -> Recording:
    """What the device's extension ``ext`` has recorded so far."""
    columns = ext.recording()
    groups = {
        number: Group(name=name, ranks=tuple(ranks) or tuple(range(world_size)))
        for number, (name, ranks) in enumerate(ext.groups())
    }
    return Recording(rank=rank, world_size=world_size, groups=groups, **columns)


def save(recording: Recording, path: Path) -> None:
    """Write a recording to ``path`` (``.npz``)."""
    columns = {name: getattr(recording, name) for name in Recording.__slots__}
    about = {name: columns.pop(name) for name in (*_TABLES, "groups", "rank", "world_size")}
    with path.open("wb") as file:
        np.savez(file, about=np.frombuffer(msgspec.json.encode(about), np.uint8), **columns)


def load(path: Path) -> Recording:
    """Read what :func:`save` wrote."""
    with np.load(path) as stored:
        columns = {name: stored[name] for name in stored.files}
    about = msgspec.json.decode(columns.pop("about").tobytes())
    groups = {int(number): Group(name=g["name"], ranks=tuple(g["ranks"])) for number, g in about["groups"].items()}
    tables: dict[str, Any] = {name: tuple(about[name]) for name in _TABLES}
    return Recording(rank=about["rank"], world_size=about["world_size"], groups=groups, **tables, **columns)
