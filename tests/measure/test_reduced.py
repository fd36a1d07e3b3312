"""Loss parity where one unsharded rank cannot be the reference."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.reduced import Reduced, ReducedLosses, reduced_file, reduced_for
from refshard.measure.run import run_suite
from refshard.models.llama import Llama
from refshard.quantities import GIB, MIB
from refshard.records import LaunchRecord
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.specs.suite import SuiteSpec
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite, write_rank

SMALL = msgspec.structs.replace(ENVIRONMENT, memory_bytes=100 * MIB)
H100S = msgspec.structs.replace(ENVIRONMENT, gpus=("H100",) * 8, gpu_memory_bytes=(80 * GIB,) * 8)
H200_BYTES = 150_109_106_176
LARGE = Case.of(
    strategy="fsdp2", gpus=8, model="llama3-8b", global_batch=8, seq_len=8192, precision="bf16", data="mine.bin",
    checkpointing=(0, 31),
)  # fmt: skip


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b", "llama3.1-405b", "llama2-7b", "llama-tiny", "qwen3-32b"])
@pytest.mark.parametrize("layers", [2, 8])
def test_a_reduced_model_is_small_and_counts_its_parameters(name: str, layers: int) -> None:
    whole = load_model(name)
    spec = whole.reduced(layers)
    with torch.device("meta"):
        model = Llama(spec)
        model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == spec.params < 1.1e9
    assert spec.n_layers == min(layers, whole.n_layers)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim) == (whole.n_heads, whole.n_kv_heads, 16)


def test_a_reference_that_does_not_fit_is_reduced_in_fp32_on_the_same_ranks() -> None:
    reduced = reduced_for(LARGE, H100S)
    assert reduced is not None
    case = LARGE.changed(precision="fp32", seq_len=128, data="synthetic", checkpointing="full")
    assert reduced.case == case
    assert reduced.model == load_model("llama3-8b").reduced(2)
    assert reduced.why == "one unsharded rank would need about 3,196 GiB, and has 80.0 GiB"
    assert reduced.text.startswith("the same case reduced to 2 layers of width 512, a vocabulary of 2,048, 128 tokens")


SCORES = {"gpus": 1, "global_batch": 1, "checkpointing": "selective"}
SERVED = {**SCORES, "model": "llama3.2-1b", "workload": "inference", "checkpointing": "none"}
QWEN = {"model": "qwen3-8b", "seq_len": 1024, "checkpointing": "none"}


@pytest.mark.parametrize(
    ("changes", "memory_bytes", "layers"),
    [
        ({"model": "llama3.2-1b", "seq_len": 128, "checkpointing": "none"}, 80 * GIB, None),
        # In fp32, Llama 3.2 1B's scores of 8,192 tokens took 128 GiB: it ran out of an H200's memory.
        ({**SCORES, "model": "llama3.2-1b"}, H200_BYTES, 2),
        ({**SCORES, "model": "qwen3-4b"}, H200_BYTES, 2),
        ({**SCORES, "model": "llama3.2-1b", "seq_len": 2048}, H200_BYTES, None),
        ({**SCORES, "model": "qwen3-4b", "seq_len": 2048}, H200_BYTES, None),
        (SERVED, H200_BYTES, None),
        (SERVED, 30 * GIB, 2),
        (QWEN, 80 * GIB, 2),  # its AdamW alone takes 122 GiB
        ({**QWEN, "model": "qwen3-0.6b"}, 80 * GIB, None),
        ({"strategy": "pipeline", "checkpointing": "none", "precision": "fp32"}, 80 * GIB, 8),  # a layer a rank
        ({}, None, None),  # where nothing is known of memory the reference is tried
    ],
)
def test_a_reference_is_reduced_if_its_scores_optimizer_or_parameters_do_not_fit(
    changes: dict[str, Any], memory_bytes: int | None, layers: int | None
) -> None:
    gpus = msgspec.structs.replace(H100S, gpu_memory_bytes=() if memory_bytes is None else (memory_bytes,) * 8)
    case = LARGE.changed(**changes)
    reduced = reduced_for(case, gpus)
    assert (reduced and reduced.model) == (layers and load_model(case.job.model).reduced(layers))


def by_strategy(suite: SuiteSpec, tmp_path: Path, launcher: Any) -> dict[str, LaunchRecord]:
    found = run_suite(suite, tmp_path / "run", launcher, Silent(), SMALL)
    assert found.header.planned == len(found.launches)
    return {record.case.job.strategy: record for record in found.launches}


def _suite(*strategies: str, **case: Any) -> SuiteSpec:
    matrix = {"strategy": list(strategies), "gpus": [2], "model": ["llama-mini"]}
    shared = {"global_batch": 2, "seq_len": 16, "measured_steps": 1, "traced_steps": 1, "device": "cpu", **case}
    return make_suite(matrix=matrix, case=shared)


def leaving(reference: tuple[float, ...], error: str = "") -> FakeLauncher:
    """A launcher whose ranks leave losses of 3 and 5 of the reduced case, and rank 0 those of its reference."""

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        reduced = msgspec.json.decode(reduced_file(folder).read_bytes(), type=Reduced)
        assert reduced.case.job.strategy == case.job.strategy
        for rank in range(case.processes):
            alone = {"reference": reference, "error": error} if rank == 0 else {}
            write_rank(case, folder, rank, reduced=ReducedLosses(losses=(3.0 + 2 * rank,) * 10, **alone))  # type: ignore[arg-type]
        return LaunchOutcome()

    return FakeLauncher(outcome)


def test_no_reference_is_launched_and_parity_is_the_reduced_cases(tmp_path: Path) -> None:
    launcher = leaving(reference=(4.0,) * 9 + (4.00001,))
    ddp = by_strategy(_suite("ddp", precision="bf16"), tmp_path, launcher)["ddp"]
    assert [case.job.strategy for case in launcher.launched] == ["ddp"]
    assert (ddp.state, ddp.error) == ("ok", None)
    assert ddp.metrics["loss_parity"] == pytest.approx(2.5e-6, rel=1e-3)
    assert ddp.proof is not None
    assert ddp.proof.parity_tolerance == 1e-5, "that of fp32, in which the reduced case computes"
    assert ddp.proof.parity_of.startswith("the same case reduced to 2 layers")
    assert ddp.proof.parity_note.startswith("one unsharded rank would need about ")


def test_a_reduced_case_that_trains_otherwise_fails_the_case(tmp_path: Path) -> None:
    ddp = by_strategy(_suite("ddp"), tmp_path, leaving(reference=(4.001,) * 10))["ddp"]
    assert ddp.state == "failed"
    assert ddp.error is not None
    assert ddp.error.startswith("proof of run: losses of the same case reduced to 2 layers of width 128")
    assert ddp.error.endswith("differ from one unsharded rank by 0.00025, more than 1e-05")


def test_a_reduced_reference_that_fails_leaves_the_timing_valid(tmp_path: Path) -> None:
    ddp = by_strategy(_suite("ddp"), tmp_path, leaving(reference=(), error="OutOfMemoryError: 2 GiB"))["ddp"]
    assert (ddp.state, ddp.metrics["loss_parity"]) == ("ok", None)
    assert ddp.proof is not None
    assert ddp.proof.parity_note.startswith(
        "not compared, because OutOfMemoryError: 2 GiB; one unsharded rank would need"
    )


def test_a_reference_that_the_suite_asks_for_is_launched_whatever_it_needs(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    found = by_strategy(_suite("single", "ddp"), tmp_path, launcher)
    assert [case.job.strategy for case in launcher.launched] == ["single", "ddp"]
    proof = found["ddp"].proof
    assert proof is not None
    assert (proof.loss_parity, proof.parity_of) == (0.0, ""), "the case's own losses are held"


@pytest.mark.full
def test_ranks_train_the_reduced_case_beside_one_unsharded_rank(tmp_path: Path) -> None:
    suite = _suite("fsdp2", "refshard-yafsdp", precision="bf16", microbatches=2, global_batch=4, checkpointing="full")
    found = by_strategy(suite, tmp_path, LocalLauncher())
    assert found.keys() == {"fsdp2", "refshard-yafsdp"}
    for record in found.values():
        assert (record.state, record.error) == ("ok", None)
        parity = record.metrics["loss_parity"]
        assert parity is not None
        assert 0 < parity < 1e-5, "summed in another order"
