"""Local parts to and from ``torch.distributed.checkpoint`` (DCP), as chunks of whole tensors under readable names.

DCP knows DTensor, whose shards are slabs. A range of a flattened parameter is several boxes instead, so this file
plans the reads and writes itself, through DCP's public planner and writer interfaces; the files are DCP's own, and
whatever reads DCP's checkpoints reads these.
"""

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from refshard.errors import CheckpointError
from refshard.plan.boxes import boxes

Place = tuple[str | int, ...]
"""Where a value lies in the nested dictionary that a checkpoint stands for; joined by dots, it is DCP's key."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One tensor of a checkpoint, and what this rank holds of it.

    ``chunks`` maps each held box's offsets to a tensor of the box's sizes, a view that is read or written in place.
    ``aliases`` are further paths under which readers find the same bytes.
    """

    path: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[tuple[int, ...], torch.Tensor]
    aliases: tuple[Place, ...] = ()

    @property
    def key(self) -> str:
        """DCP's name of the tensor."""
        return key_of(self.path)


def key_of(path: Place) -> str:
    """DCP's key of what lies at ``path``."""
    return ".".join(map(str, path))


def sharded(
    path: Place, shape: tuple[int, ...], first: int, part: torch.Tensor, aliases: Sequence[Place] = ()
) -> Stored:
    """Elements ``[first, first + part.numel())`` of a flattened tensor of ``shape``; ``part`` is 1-D."""
    if 0 in shape:  # no element and so no box; yet a reader must find the name and the shape
        return Stored(path, shape, part.dtype, {(0,) * len(shape): part.detach().view(shape)}, tuple(aliases))
    chunks, start = {}, 0
    for box in boxes(shape, first, part.numel()):
        chunks[box.offsets] = part.detach()[start : start + box.numel].view(box.sizes)
        start += box.numel
    return Stored(path, shape, part.dtype, chunks, tuple(aliases))


def whole(path: Place, tensor: torch.Tensor) -> Stored:
    """All of a tensor."""
    return Stored(path, tuple(tensor.shape), tensor.dtype, {(0,) * tensor.dim(): tensor.detach()})


def write(folder: Path, tensors: Sequence[Stored], values: Mapping[Place, bytes]) -> None:
    """Write every rank's ``tensors`` and ``values`` (as :func:`encode` made them) to an empty folder; collective.

    What several ranks hold is written once. Files are synced.

    Raises:
        CheckpointError: a rank failed; all ranks raise.
    """
    aliases = {tensor.key: tuple(map(key_of, tensor.aliases)) for tensor in tensors if tensor.aliases}
    with _failures_of_any_rank(f"the checkpoint could not be written to {folder}"):
        save(
            {},
            storage_writer=_AliasingWriter(FileSystemWriter(folder), aliases),
            planner=_Writes(tensors, values),
            no_dist=not dist.is_initialized(),
        )


def read(folder: Path, tensors: Sequence[Stored], values: Sequence[str] = ()) -> dict[str, Any]:
    """Fill ``tensors`` in place, converted to their dtypes, and return what lies under the keys ``values``; collective.

    Raises:
        CheckpointError: a rank failed; all ranks raise.
    """
    planner = _Reads(tensors, values)
    with _failures_of_any_rank(f"the checkpoint {folder} could not be read"):
        load(
            {},
            storage_reader=FileSystemReader(folder),
            planner=planner,
            no_dist=not dist.is_initialized(),
        )
    return planner.found


def encode(value: object, what: str) -> bytes:
    """``value`` as DCP's readers expect it.

    Raises:
        CheckpointError: torch would not load it back without running code from the file.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        _decode(io.BytesIO(stream.getvalue()))
    except Exception as error:
        raise CheckpointError(
            f"{what} must be made of numbers, strings, tensors, lists, tuples and dictionaries, got {value!r} "
            f"({type(error).__name__}); convert it"
        ) from error
    return stream.getvalue()


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
class _Writes(SavePlanner):
    """Plans one item per chunk. The global plan (no chunk twice, none missing) is left to DCP's own planner."""

    def __init__(self, tensors: Sequence[Stored], values: Mapping[Place, bytes]) -> None:
        self._tensors = tensors
        self._values = {key_of(path): value for path, value in values.items()}
        self._chunks = {MetadataIndex(t.key, offsets): c for t in tensors for offsets, c in t.chunks.items()}
        paths = [path for tensor in tensors for path in (tensor.path, *tensor.aliases)]
        # Under this name DCP's planners keep how keys nest, and its converters look for it.
        self._nesting = {key_of(path): path for path in (*paths, *values)}

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to set up: all was given to the constructor."""

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        for tensor in self._tensors:
            for offsets, chunk in tensor.chunks.items():
                data = TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), chunk.size()),
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                )
                items.append(WriteItem(MetadataIndex(tensor.key, offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self._nesting)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(all_plans)
        nesting = {key: path for plan in all_plans for key, path in plan.planner_data.items()}
        return plans, replace(metadata, planner_data=nesting)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[write_item.index.fqn])
        return self._chunks[write_item.index]


@final
class _Reads(LoadPlanner):
    """Plans the reads that fill each chunk from whichever chunks were saved. The metadata was checked before."""

    def __init__(self, tensors: Sequence[Stored], values: Sequence[str]) -> None:
        self._tensors = tensors
        self._values = values
        self._chunks = {MetadataIndex(t.key, offsets): c for t in tensors for offsets, c in t.chunks.items()}
        self._metadata: Metadata | None = None
        self.found: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: object, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        saved, items = self._metadata.state_dict_metadata, []
        for tensor in self._tensors:
            chunks = [ChunkStorageMetadata(torch.Size(o), c.size()) for o, c in tensor.chunks.items() if c.numel()]
            entry = saved[tensor.key]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(tensor.key, entry, chunks)
        items += [_read_bytes(key) for key in self._values]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = _decode(value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        chunk = self._chunks[read_item.dest_index]
        return chunk[tuple(slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to commit: the tensor was written in place."""


def _read_bytes(key: str) -> ReadItem:
    index, nowhere = MetadataIndex(key), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


@final
class _AliasingWriter(StorageWriter):
    """Passes everything on to ``inner``; at the end, lists what was written under its aliases too.

    A tied weight has several names, and readers ask for each. They all find the same bytes of the same file.
    """

    def __init__(self, inner: StorageWriter, aliases: Mapping[str, Sequence[str]]) -> None:
        self._inner = inner
        self._aliases = aliases

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._inner.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return self._inner.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for key, aliases in self._aliases.items():
            written = [result for of_rank in results for result in of_rank if result.index.fqn == key]
            for alias in aliases:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
                results.append([replace(r, index=replace(r.index, fqn=alias)) for r in written])
        self._inner.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return self._inner.storage_meta()
