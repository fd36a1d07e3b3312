"""What the host's labels mean, and where they hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refshard.analysis.labels import ROOT, Labels, find_labels, meaning_of
from refshard.events.reader import read_events
from refshard.events.timeline import Meaning
from tests.analysis.handmade import BASE_US, note, write


@pytest.mark.parametrize(("name", "meaning", "unit"), [
    ("refshard::all_gather(layers.0)", Meaning.ALL_GATHER | Meaning.COPY_IN, "layers.0"),
    ("refshard::reduce_scatter(a(b))", Meaning.REDUCE | Meaning.WAIT, "a(b)"),
    ("refshard::wait(x)", Meaning.WAIT, "x"),
    ("refshard::all_to_all(x)", Meaning.COPY_IN, "x"),
    ("refshard::backward(x)", Meaning.BACKWARD, "x"),
    ("FSDP::all_gather (layers.0)", Meaning.ALL_GATHER, "layers.0"),
    ("FSDP::all_gather", Meaning.ALL_GATHER, ROOT),
    ("FSDP::post_backward_reduce (layers.7.mlp)", Meaning.REDUCE, "layers.7.mlp"),
    ("FSDP::post_backward_rs_wait (None)", Meaning.REDUCE_WAIT | Meaning.WAIT, ROOT),
    ("fsdp::chunk_cat", Meaning.REDUCE | Meaning.COPY_IN, None),
    ("Optimizer.step#AdamW.step", Meaning.OPTIMIZER, None),
])  # fmt: skip
def test_labels_of_every_peer_have_one_meaning(name: str, meaning: Meaning, unit: str | None) -> None:
    assert meaning_of(name) == (meaning, unit)


@pytest.mark.parametrize(
    "name", ["aten::mm", "refshard::unheard(x)", "FSDP::root_pre_forward", "FSDP::backward_prefetch for layers.1", ""]
)
def test_other_names_mean_nothing(name: str) -> None:
    assert meaning_of(name) is None


def labels_of(path: Path, *named: tuple[str, float, float]) -> Labels:
    events: list[dict[str, Any]] = [note(n, s, d) for n, s, d in named]
    return find_labels(read_events(write(path / "t.json", events)))


def units_computing(labels: Labels, points: list[float]) -> list[str | None]:
    found, _ = labels.computing(np.array([BASE_US * 1000 + int(p * 1000) for p in points]))
    return [labels.unit_names[unit] if unit >= 0 else None for unit in found]


def test_the_unit_that_computes_is_the_last_begun_and_not_left(tmp_path: Path) -> None:
    """FSDP2's root begins before its layers and computes again once they are left."""
    labels = labels_of(
        tmp_path,
        ("FSDP::pre_forward", 0, 1), ("FSDP::pre_forward (a)", 2, 1), ("FSDP::post_forward (a)", 6, 1),
        ("FSDP::pre_forward (b)", 8, 1), ("FSDP::post_forward (b)", 10, 1), ("FSDP::post_forward", 14, 1),
        ("FSDP::pre_backward (b)", 20, 1),
    )  # fmt: skip
    assert units_computing(labels, [-1, 1, 3, 7, 9, 12, 15, 25]) == [None, ROOT, "a", ROOT, "b", ROOT, None, "b"]
    _, phases = labels.computing(np.array([BASE_US * 1000 + us * 1000 for us in (3, 15, 25)]))
    assert phases.tolist() == [Meaning.FORWARD, 0, Meaning.BACKWARD]


def test_an_optimizer_ends_whatever_was_begun(tmp_path: Path) -> None:
    labels = labels_of(tmp_path, ("FSDP::pre_backward (a)", 0, 1), ("Optimizer.step#AdamW.step", 5, 3))
    assert units_computing(labels, [2, 6, 20]) == ["a", None, None]
