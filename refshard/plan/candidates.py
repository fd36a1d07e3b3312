"""Configurations as columns: one array per field, so that thousands are estimated at once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.specs.configuration import Configuration

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FIELDS = tuple(field.name for field in msgspec.structs.fields(Configuration))


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Configurations, one a row. Columns are int64: numbers and flags as they are, words by their place in
    ``words``.
    """

    columns: Mapping[str, Integers]
    words: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> Self:
        """These configurations, in their order."""
        columns: dict[str, Integers] = {}
        words: dict[str, tuple[str, ...]] = {}
        for name in FIELDS:
            given = [getattr(one, name) for one in configurations]
            if given and isinstance(given[0], str):
                words[name] = tuple(dict.fromkeys(given))
                places = {word: place for place, word in enumerate(words[name])}
                given = [places[word] for word in given]
            columns[name] = np.array(given, np.int64)
        return cls(columns, words)

    def __len__(self) -> int:
        return len(self.columns["shard"])

    def __getitem__(self, field: str) -> Integers:
        return self.columns[field]

    def flag(self, field: str) -> Mask:
        """A field that is true or false."""
        return self.columns[field].astype(np.bool_)

    def where(self, field: str, *chosen: str) -> Mask:
        """Which rows have one of these words."""
        places = [place for place, word in enumerate(self.words[field]) if word in chosen]
        return np.isin(self.columns[field], places)

    def mapped(self, field: str, number: Callable[[str], float]) -> Floats:
        """A number for each row's word."""
        return np.array([number(word) for word in self.words[field]], np.float64)[self.columns[field]]

    def take(self, rows: Integers | Mask) -> "Candidates":
        """Some of the rows."""
        return Candidates({name: column[rows] for name, column in self.columns.items()}, self.words)

    def configuration(self, row: int) -> Configuration:
        """One row as a value."""
        found = {name: int(column[row]) for name, column in self.columns.items()}
        texts = {name: self.words[name][found[name]] for name in self.words}
        flags = {f.name: bool(found[f.name]) for f in msgspec.structs.fields(Configuration) if f.type is bool}
        return Configuration(**{**found, **texts, **flags})  # type: ignore[arg-type]

    @property
    def data_ranks(self) -> Integers:
        """Ranks that divide the batch."""
        return self["shard"] * self["replicate"]

    @property
    def shards(self) -> Integers:
        """Ranks that a strategy which shards divides parameters over."""
        return self["shard"] * self["context"]

    @property
    def world_size(self) -> Integers:
        """Ranks in all."""
        return self.data_ranks * self["context"] * self["tensor"] * self["pipeline"]


def by_distinct(columns: Sequence[npt.NDArray[np.generic]], value: Callable[..., tuple[float, ...]]) -> Floats:
    """``value`` of each distinct row of the columns, computed once and spread over all rows: (values, rows)."""
    rows = list(zip(*(column.tolist() for column in columns)))
    known: dict[Hashable, tuple[float, ...]] = {}
    for row in rows:
        if row not in known:
            known[row] = value(*row)
    return np.array([known[row] for row in rows], np.float64).reshape(len(rows), -1).T
