"""Flat dictionaries of tensors and values to and from ``torch.distributed.checkpoint`` (DCP), under readable names.

DCP's own planners do the work: a local part tells them which boxes of its tensor it holds
(:mod:`refshard.engine.local_part`). What is added here is that keys are flat already, so that a value may be a
dictionary; that values are read without running code from the file; and that a tied weight is written once.
"""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from refshard.errors import CheckpointError

Place = tuple[str | int, ...]
"""Where a value lies in the nested dictionary that a checkpoint stands for; joined by dots, it is DCP's key."""
Entries = Mapping[Place, Any]
"""What a rank has to write: tensors, among them local parts, and values that :func:`check_loadable` accepts."""


def key_of(path: Place) -> str:
    """DCP's key of what lies at ``path``."""
    return ".".join(map(str, path))


def write(folder: Path, entries: Entries, aliases: Mapping[Place, Sequence[Place]]) -> None:
    """Write every rank's ``entries`` to an empty folder, and list some under further places too; collective.

    What several ranks hold is written once. Files are synced.

    Raises:
        CheckpointError: a rank failed; all ranks raise.
    """
    keys = {key_of(path): tuple(map(key_of, others)) for path, others in aliases.items()}
    places = [*entries, *(other for others in aliases.values() for other in others)]
    with _failures_of_any_rank(f"the checkpoint could not be written to {folder}"):
        save(
            {},
            storage_writer=_AliasingWriter(folder, keys),
            planner=_Writes({key_of(path): value for path, value in entries.items()}, places),
            no_dist=not dist.is_initialized(),
        )


def read(folder: Path, tensors: Mapping[str, torch.Tensor], values: Sequence[str] = ()) -> dict[str, Any]:
    """Fill ``tensors``, by key, in place, converted to their dtypes, and return what lies under the keys ``values``;
    collective.

    Raises:
        CheckpointError: a rank failed; all ranks raise.
    """
    planner = _Reads(tensors, values)
    with _failures_of_any_rank(f"the checkpoint {folder} could not be read"):
        load({}, storage_reader=FileSystemReader(folder), planner=planner, no_dist=not dist.is_initialized())
    return planner.found


def check_loadable(value: object, what: str) -> None:
    """Check that torch loads a value back without running code from the file.

    Raises:
        CheckpointError: it would not.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        _decode(stream)
    except Exception as error:
        raise CheckpointError(
            f"{what} must be made of numbers, strings, tensors, lists, tuples and dictionaries, got {value!r} "
            f"({type(error).__name__}); convert it"
        ) from error


def _decode(stream: io.BytesIO) -> Any:
    return torch.load(stream, map_location="cpu", weights_only=True)


@contextmanager
def _failures_of_any_rank(what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # One process without a process group is a world of one rank; DCP would warn that it takes it for that.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"{what}: rank {rank} failed with {type(cause).__name__}: {cause}") from error


@final
class _Writes(DefaultSavePlanner):
    """DCP's own planner, given keys that are flat already, and how they nest."""

    def __init__(self, entries: dict[str, Any], places: Sequence[Place]) -> None:
        super().__init__()
        self._entries, self._nesting = entries, {key_of(place): place for place in places}

    def set_up_planner(self, state_dict: object, storage_meta: object = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.mappings, self.is_coordinator = self._entries, self._nesting, is_coordinator


@final
class _Reads(DefaultLoadPlanner):
    """DCP's own planner for tensors by their keys. The metadata was checked before."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], values: Sequence[str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors, self._values = tensors, values
        self.found: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: object, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = dict(self._tensors), metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return replace(plan, items=[*plan.items, *map(_read_bytes, self._values)])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = _decode(value)


def _read_bytes(key: str) -> ReadItem:
    index, nowhere = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


@final
class _AliasingWriter(FileSystemWriter):
    """At the end, lists what was written under its aliases too.

    A tied weight has several names, and readers ask for each. They all find the same bytes of the same file.
    """

    def __init__(self, folder: Path, aliases: Mapping[str, Sequence[str]]) -> None:
        super().__init__(folder)
        self._aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for key, aliases in self._aliases.items():
            written = [result for of_rank in results for result in of_rank if result.index.fqn == key]
            for alias in aliases:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
                results.append([replace(r, index=replace(r.index, fqn=alias)) for r in written])
        super().finish(metadata, results)
