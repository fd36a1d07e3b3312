"""Published runs with their layout: every file keeps the schema, and figures of one run agree."""

from collections.abc import Iterator
from typing import Any

import pytest

from refshard.errors import SpecError
from refshard.specs.model import load_model
from refshard.specs.published_parallel import ParallelRun, ParallelTable, load_parallel
from refshard.specs.reading import convert

TABLES = load_parallel()
RUN: dict[str, Any] = {
    "model": "llama3-8b", "gpus": 8, "hardware": "h100-sxm-80gb", "precision": "bf16", "tensor": 2, "seq_len": 8192,
    "global_batch": 128, "seconds": 10.0,
}  # fmt: skip


def runs() -> Iterator[tuple[ParallelTable, ParallelRun]]:
    return ((table, run) for table in TABLES.values() for run in table.runs)


def test_every_model_has_dimensions_or_is_one_that_its_source_does_not_describe() -> None:
    presets = {"llama2-7b", "llama2-13b", "llama2-34b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-405b"}
    unknown = {run.model for table, run in runs() if run.model not in {*presets, *table.shapes}}
    assert not {name for name in unknown if name.startswith(("llama", "mpt"))}
    assert [load_model(name).dim for name in sorted(presets)] == [5120, 8192, 8192, 4096, 8192, 4096, 16384]


def test_each_run_stands_once() -> None:
    listed = list(runs())
    assert len({run for _, run in listed}) == len(listed) == 720


def test_figures_are_as_printed() -> None:
    paper = TABLES["llama3-paper"].runs
    assert [(run.gpus, run.tflops_per_gpu, run.mfu) for run in paper] == [
        (8192, 430.0, 0.43), (16384, 400.0, 0.41), (16384, 380.0, 0.38),
    ]  # fmt: skip
    scaling = {
        run.gpus: run.seconds for run in TABLES["dgxc-benchmarking"].runs
        if (run.model, run.strategy, run.precision, run.seq_len) == ("llama2-70b", "maxtext", "bf16", 4096)
    }  # fmt: skip
    assert scaling == {64: 6.999, 128: 7.072, 256: 7.153, 512: 7.091, 1024: 7.084, 2048: 7.066}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_s": 100_000.0}, "tokens_per_s must be what the run's other figures give, 104858, got 100000"),
        ({"tokens_per_s_gpu": 15_000.0}, "tokens_per_s_gpu must be what .* 13107.2, got 15000"),
        ({"seconds": None}, "a run must have a figure"),
        ({"tensor": 3}, "tensor x pipeline x context must divide the 8 GPUs, got 3"),
        ({"microbatch": 0}, "microbatch must be >= 1"),
        ({"precision": "fp7"}, "precision"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"title": "t", "source": "s", "runs": [{**RUN, **changes}]}
    with pytest.raises(SpecError, match=message):
        convert(given, ParallelTable, where="published x")
    convert({**given, "runs": [{**RUN, "tokens_per_s": 104_000.0}]}, ParallelTable, where="published x")
