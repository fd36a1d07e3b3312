"""Data: the same tokens for every world size and machine, and something in them to learn."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refshard.errors import SpecError
from refshard.models.data import SyntheticTokens, TokenFile, TokenSource, open_source, rank_batch
from refshard.models.llama import Llama, initialise, next_token_loss
from tests.models import small_spec

GOLDEN_FIRST = [1, 824, 4, 36, 58, 5, 1, 21]
GOLDEN_SHA256 = "66a03bdf3e666b55dd1b4758cfe85e9a23efca864eb463ef988224c7b10d8d6c"
"""Of the first batch (8 sequences of 128) of vocab 1024 and seed 0, inputs as little-endian int64."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_see_the_batch_of_one_rank(world_size: int) -> None:
    source = SyntheticTokens(vocab=1024, seed=0)
    inputs, targets = joined(source, step=3, world_size=world_size, global_batch=8, seq_len=32)
    expected_inputs, expected_targets = source.batch(3, 8, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert np.array_equal(inputs, expected_inputs)
    assert np.array_equal(targets, expected_targets)


@given(
    world_size=st.integers(1, 6),
    share=st.integers(1, 4),
    step=st.integers(0, 10**9),
    seq_len=st.integers(1, 40),
    vocab=st.integers(1, 5000),
    seed=st.integers(-5, 2**64),
)
def test_any_slicing_of_synthetic_rows_joins_to_the_batch(
    world_size: int, share: int, step: int, seq_len: int, vocab: int, seed: int
) -> None:
    source = SyntheticTokens(vocab, seed)
    global_batch = world_size * share
    inputs, targets = joined(source, step=step, world_size=world_size, global_batch=global_batch, seq_len=seq_len)
    whole_inputs, whole_targets = source.batch(step, global_batch, seq_len)
    assert np.array_equal(inputs, whole_inputs)
    assert np.array_equal(targets, whole_targets)
    assert inputs.shape == targets.shape == (global_batch, seq_len)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.min()) >= 0
    assert int(inputs.max()) < vocab


def test_synthetic_tokens_are_the_same_on_every_machine() -> None:
    inputs, _ = SyntheticTokens(vocab=1024, seed=0).batch(0, 8, 128)
    assert inputs[0, :8].tolist() == GOLDEN_FIRST
    assert hashlib.sha256(inputs.astype("<i8").tobytes()).hexdigest() == GOLDEN_SHA256


def test_a_synthetic_sequence_depends_on_its_number_and_seed_only() -> None:
    source = SyntheticTokens(vocab=1024, seed=0)
    some = source.sequences(range(10), 50)
    assert np.array_equal(source.sequences(range(7, 9), 50), some[7:9])
    assert np.array_equal(source.sequences(range(10), 20), some[:, :20])
    assert not np.array_equal(SyntheticTokens(vocab=1024, seed=1).sequences(range(10), 50), some)
    assert len({row.tobytes() for row in some}) == 10


def test_synthetic_tokens_form_a_sparse_chain_with_skewed_frequencies() -> None:
    tokens = SyntheticTokens(vocab=1024, seed=0).sequences(range(256), 256)
    frequencies = np.bincount(tokens.ravel(), minlength=1024) / tokens.size
    assert frequencies[:10].sum() > 0.25
    assert 0 < frequencies[512:].sum() < 0.25
    followers = Counter(tokens[:, 1:][tokens[:, :-1] == 0].tolist())
    total = followers.total()
    (_, first), *_, (_, fourth) = followers.most_common(4)
    assert 0.3 < first / total < 0.6
    assert fourth / total > 0.05
    assert sum(count for _, count in followers.most_common(4)) / total > 0.7


@pytest.mark.slow
def test_a_tiny_model_learns_the_synthetic_tokens() -> None:
    torch.set_num_threads(1)
    spec = small_spec(n_layers=2, n_kv_heads=2)
    model = Llama(spec)
    initialise(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = SyntheticTokens(spec.vocab, seed=0)
    losses = []
    for step in range(50):
        inputs, targets = rank_batch(source, step=step, rank=0, world_size=1, global_batch=8, seq_len=64)
        loss = next_token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(spec.vocab), abs=0.1)
    assert np.mean(losses[-5:]) < losses[0] - 0.5


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64])
def test_a_npy_file_is_read_in_consecutive_sequences(tmp_path: Path, dtype: type) -> None:
    source = npy_source(tmp_path, np.arange(100).astype(dtype), vocab=100)
    inputs, targets = source.batch(1, 2, 4)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.tolist() == [[10, 11, 12, 13], [15, 16, 17, 18]]
    assert targets.tolist() == [[11, 12, 13, 14], [16, 17, 18, 19]]


def test_a_file_wraps_round_at_its_end(tmp_path: Path) -> None:
    source = npy_source(tmp_path, np.arange(7), vocab=7)
    assert source.sequences(range(3), 5).tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6, 0]]
    assert source.sequences(range(7, 8), 5).tolist() == [[0, 1, 2, 3, 4]]


def test_a_text_file_is_its_utf8_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("shärd it", encoding="utf-8")
    inputs, targets = open_source(str(path), vocab=256, seed=0).batch(0, 1, 8)
    assert bytes(inputs[0].tolist()).decode() == "shärd i"
    assert bytes(targets[0].tolist()).decode(errors="replace") == "härd it"


@given(length=st.integers(9, 60), world_size=st.integers(1, 4), share=st.integers(1, 3), step=st.integers(0, 99))
def test_any_slicing_of_file_rows_joins_to_the_batch(
    tmp_path_factory: pytest.TempPathFactory, length: int, world_size: int, share: int, step: int
) -> None:
    source = npy_source(tmp_path_factory.mktemp("data"), np.arange(length), vocab=length)
    inputs, targets = joined(source, step=step, world_size=world_size, global_batch=world_size * share, seq_len=8)
    whole_inputs, whole_targets = source.batch(step, world_size * share, 8)
    assert np.array_equal(inputs, whole_inputs)
    assert np.array_equal(targets, whole_targets)


def test_open_source_tells_synthetic_from_a_path(tmp_path: Path) -> None:
    synthetic = open_source("synthetic", vocab=50, seed=4)
    assert np.array_equal(synthetic.sequences(range(2), 9), SyntheticTokens(50, 4).sequences(range(2), 9))
    np.save(tmp_path / "tokens.npy", np.arange(20))
    assert isinstance(open_source(str(tmp_path / "tokens.npy"), vocab=50, seed=4), TokenFile)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), dtype=np.int64), r"1-D array of integers, got int64 of shape \(4, 4\); flatten"),
        (np.zeros(16), r"1-D array of integers, got float64 of shape \(16,\); .*convert"),
        (np.zeros(16, dtype=bool), r"1-D array of integers, got bool"),
    ],
)
def test_a_npy_file_of_the_wrong_kind_is_refused(tmp_path: Path, array: np.ndarray[Any, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        npy_source(tmp_path, array, vocab=10)


@pytest.mark.parametrize("content", [b"", b"not numpy", b"\x93NUMPY\x01\x00"])
def test_a_damaged_npy_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens.npy"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"tokens\.npy: cannot be read as \.npy .*numpy\.save"):
        TokenFile(path, 10)


def test_an_archive_is_no_npy_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    with path.open("wb") as file:
        np.savez(file, tokens=np.arange(9))
    with pytest.raises(SpecError, match="1-D array of integers, got an archive"):
        TokenFile(path, 10)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'synthetic' or an existing file, got '.*none\.npy'; correct"):
        open_source(str(tmp_path / "none.npy"), vocab=10, seed=0)


def test_text_needs_a_token_for_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc")
    with pytest.raises(SpecError, match="vocab of at least 256, one token per byte, got 255; choose"):
        TokenFile(path, 255)


@pytest.mark.parametrize("name", ["few.npy", "few.txt", "empty.txt"])
def test_a_file_shorter_than_a_sequence_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".npy":
        np.save(path, np.arange(8))
    else:
        path.write_bytes(b"12345678" if name.startswith("few") else b"")
    with pytest.raises(SpecError, match=rf"seq_len \+ 1 = 9 tokens, but .*{name} holds \d; give a larger"):
        TokenFile(path, 256).batch(0, 1, 8)


@pytest.mark.parametrize("token", [10, -1, 2**63 - 1])
def test_a_token_outside_the_vocabulary_is_refused_when_met(tmp_path: Path, token: int) -> None:
    source = npy_source(tmp_path, np.array([0, 1, 2, 3, 4, 5, 9, token]), vocab=10)
    assert source.batch(0, 1, 3)[0].tolist() == [[0, 1, 2]]
    with pytest.raises(SpecError, match=rf"must lie in 0\.\.9, but .*tokens\.npy holds {token}; choose"):
        source.batch(1, 1, 3)


def test_rank_batch_refuses_an_uneven_batch_and_an_unknown_rank() -> None:
    source = SyntheticTokens(vocab=10, seed=0)
    with pytest.raises(SpecError, match="multiple of the 2 data-parallel ranks, got 3"):
        rank_batch(source, step=0, rank=0, world_size=2, global_batch=3, seq_len=4)
    with pytest.raises(SpecError, match=r"rank must lie in 0\.\.1, got 2"):
        rank_batch(source, step=0, rank=2, world_size=2, global_batch=4, seq_len=4)


def npy_source(folder: Path, tokens: np.ndarray[Any, Any], vocab: int) -> TokenFile:
    np.save(folder / "tokens.npy", tokens)
    return TokenFile(folder / "tokens.npy", vocab)


def joined(
    source: TokenSource, *, step: int, world_size: int, global_batch: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of all ranks, in rank order."""
    parts = [
        rank_batch(source, step=step, rank=r, world_size=world_size, global_batch=global_batch, seq_len=seq_len)
        for r in range(world_size)
    ]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
