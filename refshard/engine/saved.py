"""What a checkpoint's folder claims to hold, checked before anything is read from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from refshard.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's folder and its metadata; ``key in saved`` says whether it lists a value under DCP's ``key``."""

    folder: Path
    metadata: Metadata

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the metadata, and check that all files are there.

        Raises:
            CheckpointError: there is no complete checkpoint.
        """
        path = folder / ".metadata"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds no complete checkpoint: it has no .metadata; give the folder of a save"
            )
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}); give another checkpoint"
            ) from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{path} was not written by torch.distributed.checkpoint; give another checkpoint")
        saved = cls(folder, metadata)
        saved._check_files()
        return saved

    @property
    def save_id(self) -> str | None:
        """What tells this save from any other, also from another one to the same folder."""
        return self.metadata.storage_meta.save_id if self.metadata.storage_meta else None

    def __contains__(self, key: str) -> bool:
        return key in self.metadata.state_dict_metadata

    def keys_below(self, top: str) -> list[str]:
        """The keys of all that lies in the dictionary ``top``."""
        return sorted(key for key in self.metadata.state_dict_metadata if key.startswith(f"{top}."))

    def location(self, key: str) -> list[tuple[str, int]]:
        """Files and offsets of a tensor's bytes."""
        return sorted((s.relative_path, s.offset) for i, s in self.metadata.storage_data.items() if i.fqn == key)

    def check_shape(self, key: str, shape: tuple[int, ...], what: str) -> None:
        """Check that the tensor ``what`` of the model can be filled.

        Raises:
            CheckpointError: the checkpoint does not hold it, or not in this shape.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"checkpoint {self.folder} lacks {what} of shape {shape}, which the model has; build the model that "
                "was saved, or give the checkpoint of this one"
            )
        if tuple(entry.size) != shape:
            raise CheckpointError(
                f"checkpoint {self.folder} holds {what} with shape {tuple(entry.size)}, but the model's has {shape}; "
                "build the model that was saved, or give the checkpoint of this one"
            )

    def _check_files(self) -> None:
        """Check that the chunks cover each tensor, and that the files are there and as long as they must be."""
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                held, total = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
                if held != total:
                    raise CheckpointError(
                        f"checkpoint {self.folder} holds {held} of the {total} elements of '{key}'; give a complete one"
                    )
        needed: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, size in needed.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found < size:
                raise CheckpointError(
                    f"checkpoint {self.folder} is incomplete: {name} must have {size} bytes, but has {found}; give "
                    "another, on a file system that all ranks share"
                )
