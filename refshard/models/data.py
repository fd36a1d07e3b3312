"""Training tokens, the same on every machine and for every world size, and one rank's share of a step's batch.

A *source* numbers its sequences without end and yields any of them without yielding the earlier ones. Step ``s`` of a
run trains on sequences ``s * global_batch`` up to ``(s + 1) * global_batch``; each rank asks for its own rows only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from refshard.errors import SpecError
from refshard.models.llama import next_token_loss

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

SYNTHETIC = "synthetic"
"""The name under which :func:`open_source` knows :class:`SyntheticTokens`."""

_BRANCHES = 4
_BRANCH_OF_3_BITS: Int64Array = np.array([0, 0, 0, 0, 1, 1, 2, 3], dtype=np.int64)
"""Which successor follows: the first with probability 1/2, the second 1/4, the others 1/8 each."""


class TokenSource(ABC):
    """An endless, numbered list of token sequences."""

    @abstractmethod
    def sequences(self, numbers: range, length: int) -> Int64Array:
        """Sequences ``numbers`` (consecutive), each of ``length`` tokens: (len(numbers), length) int64.

        Raises:
            SpecError: the source cannot serve them.
        """

    @final
    def batch(
        self, step: int, global_batch: int, seq_len: int, rows: range | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Inputs and next-token targets, each (B, T) int64, of ``rows`` of the global batch (default: all).

        Raises:
            SpecError: the source cannot serve them.
        """
        first, rows = step * global_batch, range(global_batch) if rows is None else rows
        tokens = self.sequences(range(first + rows.start, first + rows.stop), seq_len + 1)
        return tokens[:, :-1], tokens[:, 1:]


def open_source(data: str, vocab: int, seed: int) -> TokenSource:
    """The source that a case's ``data`` names: ``"synthetic"`` or the path of a token file.

    Raises:
        SpecError: see :class:`TokenFile`.
    """
    return SyntheticTokens(vocab, seed) if data == SYNTHETIC else TokenFile(Path(data), vocab)


def rank_batch(
    source: TokenSource, *, step: int, rank: int, world_size: int, global_batch: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (global_batch / world_size, seq_len) int64 on the CPU, of one rank.

    Concatenated in rank order they are the global batch for every world size.

    Raises:
        SpecError: ``global_batch`` is no multiple of ``world_size``, there is no such rank, or the source cannot serve
            the rows.
    """
    if global_batch % world_size:
        raise SpecError(f"global_batch must be a multiple of the {world_size} data-parallel ranks, got {global_batch}")
    if not 0 <= rank < world_size:
        raise SpecError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    share = global_batch // world_size
    both = source.batch(step, global_batch, seq_len, range(rank * share, (rank + 1) * share))
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(tokens)) for tokens in both)
    return inputs, targets


@final
class SyntheticTokens(TokenSource):
    """A sparse Markov chain over Zipf-distributed tokens: something to learn, without a download.

    One token in four is drawn anew, token ``v`` with a probability that falls as ``1 / (v + 1)``. Any other is one of
    the four successors of the token before it, taken with probabilities 1/2, 1/4, 1/8 and 1/8; a token's successors
    are themselves such draws, fixed by the seed. All is integer arithmetic, so the tokens depend on neither the machine
    nor numpy's version.
    """

    def __init__(self, vocab: int, seed: int) -> None:
        weights = np.uint64(2**24) // np.arange(1, vocab + 1, dtype=np.uint64)
        self._cumulative = np.cumsum(weights, dtype=np.uint64)
        self._seed = _splitmix64(np.array([seed % 2**64], dtype=np.uint64), 1)[0]
        # Sequences are numbered from 0 upwards, so the last number of all is free for the table.
        bits = self._stream(np.array([2**64 - 1], dtype=np.uint64), vocab * _BRANCHES)
        self._successors = self._zipf(bits).reshape(vocab, _BRANCHES)

    def sequences(self, numbers: range, length: int) -> Int64Array:
        """Sequences ``numbers``, each of ``length`` tokens: (len(numbers), length) int64."""
        bits = self._stream(np.arange(numbers.start, numbers.stop, dtype=np.uint64), length)
        fresh = (bits & np.uint64(3)) == 0
        fresh[:, 0] = True
        branch = _BRANCH_OF_3_BITS[(bits >> np.uint64(2) & np.uint64(7)).astype(np.int64)]
        # Each token that is not fresh becomes a successor of the one before it. All runs advance together, one token a
        # round: there are as many rounds as the longest run has tokens (some forty), not as a sequence has.
        tokens, flat = self._zipf(bits), fresh.ravel()
        in_a_row, branches = tokens.ravel(), branch.ravel()
        ends = np.append(flat, True)  # the end of the array ends the last run
        at = np.flatnonzero(flat) + 1
        while (at := at[~ends[at]]).size:
            in_a_row[at] = self._successors[in_a_row[at - 1], branches[at]]
            at += 1
        return tokens

    def _stream(self, numbers: UInt64Array, length: int) -> UInt64Array:
        """64 hashed bits for each place of each sequence: (len(numbers), length) uint64."""
        keys = _splitmix64(self._seed + numbers[:, None], 1)
        return _splitmix64(keys, np.arange(1, length + 1, dtype=np.uint64))

    def _zipf(self, bits: UInt64Array) -> Int64Array:
        """Zipf-distributed tokens from the upper 32 bits, by inversion of the cumulative weights."""
        # 32 bits times a total under 2**29 stays within 64 bits.
        points = (bits >> np.uint64(32)) * self._cumulative[-1] >> np.uint64(32)
        tokens: Int64Array = np.searchsorted(self._cumulative, points, side="right").astype(np.int64)
        return tokens


def _splitmix64(seeds: UInt64Array, counts: UInt64Array | int) -> UInt64Array:
    """The ``counts``-th output (from 1) of SplitMix64 seeded with ``seeds``, element by element.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z: UInt64Array = seeds + np.asarray(counts, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@final
class TokenFile(TokenSource):
    """Tokens of a memory-mapped file in consecutive sequences; after its last token comes the first again.

    ``path`` is a ``.npy`` file that holds a 1-D integer array, or else a text file: its UTF-8 bytes are the tokens.

    Raises:
        SpecError: the file is missing or is no such array, or it is text and ``vocab`` is under 256.
    """

    def __init__(self, path: Path, vocab: int) -> None:
        if not path.is_file():
            raise SpecError(f"data must be '{SYNTHETIC}' or an existing file, got '{path}'; correct the path")
        self._path = path
        self._vocab = vocab
        self._tokens = _map_npy(path) if path.suffix == ".npy" else _map_text(path, vocab)

    def sequences(self, numbers: range, length: int) -> Int64Array:
        """Sequences ``numbers``, each of ``length`` tokens: (len(numbers), length) int64.

        Raises:
            SpecError: the file holds fewer than ``length`` tokens, or one of these is outside the vocabulary.
        """
        total = len(self._tokens)
        if total < length:
            raise SpecError(
                f"data must hold at least seq_len + 1 = {length} tokens, but {self._path} holds {total}; "
                "give a larger file or a smaller seq_len"
            )
        places = np.arange(numbers.start * length, numbers.stop * length) % total
        tokens = self._tokens[places]
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self._vocab:
                raise SpecError(
                    f"tokens must lie in 0..{self._vocab - 1}, but {self._path} holds {token}; "
                    "choose a model with a larger vocab or tokenise the data for this one"
                )
        return tokens.astype(np.int64).reshape(len(numbers), length)


def _map_npy(path: Path) -> NDArray[np.integer]:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise SpecError(f"{path}: cannot be read as .npy ({error}); save it with numpy.save") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        found = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "an archive"
        raise SpecError(f"{path}: must hold a 1-D array of integers, got {found}; flatten and convert it")
    return tokens


def _map_text(path: Path, vocab: int) -> NDArray[np.integer]:
    if vocab < 256:
        raise SpecError(f"text needs a vocab of at least 256, one token per byte, got {vocab}; choose another model")
    if path.stat().st_size == 0:  # numpy cannot map it, and the error of `sequences` is clearer
        return np.empty(0, dtype=np.uint8)
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None


class Batch(ABC):
    """Some sequences, on the device of the model."""

    @abstractmethod
    def loss(self, module: nn.Module) -> Tensor:
        """The mean loss over these sequences, a scalar; ``module`` is the model, wrapped or not."""

    @abstractmethod
    def split(self, parts: int) -> Sequence[Self]:
        """The same sequences as microbatches of one size; their number is a multiple of ``parts``."""


@final
@dataclass(frozen=True, slots=True)
class Tokens(Batch):
    """Inputs and next-token targets of a Llama, each (B, T) int64."""

    inputs: Tensor
    targets: Tensor

    def loss(self, module: nn.Module) -> Tensor:
        """See :meth:`Batch.loss`: mean cross entropy, fp32."""
        return next_token_loss(module(self.inputs), self.targets)

    def split(self, parts: int) -> Sequence[Self]:
        """See :meth:`Batch.split`."""
        return [type(self)(*both) for both in zip(self.inputs.chunk(parts), self.targets.chunk(parts))]
