"""Emulated cases from a suite to records and a page, with real processes."""

from pathlib import Path

import pytest

from refshard.analysis.evidence import gather
from refshard.analysis.kineto import read_timeline
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import run_suite
from refshard.records import Run
from refshard.report.run.answer import as_rows, run_answer
from refshard.report.run.page import write_dashboard
from refshard.specs.reading import convert
from refshard.specs.suite import SuiteSpec, find_suite, load_suite
from tests.emulate import make_cluster, write_cluster
from tests.measure.fakes import ENVIRONMENT, Silent
from tests.report import printed

# Elastic leaves the files of its logs to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.processes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Two of eight ranks of two nodes, as processes that share no process group."""
    folder = tmp_path_factory.mktemp("emulated")
    case = {
        "model": "llama-tiny", "gpus": 8, "resident_ranks": 2, "batch_per_rank": 1, "seq_len": 16,
        "device": "cpu", "measured_steps": 2, "traced_steps": 1, "time_limit_s": 120, "fidelity": "emulated",
        "cluster": str(write_cluster(folder / "lab.toml", make_cluster())),
    }  # fmt: skip
    suite = convert(
        {"name": "emulated", "matrix": {"strategy": "refshard-yafsdp"}, "case": case}, SuiteSpec, where="suite"
    )
    run = run_suite(suite, folder / "run", LocalLauncher(), Silent(), ENVIRONMENT, oversubscribe=True)
    return run, folder / "run"


def test_a_case_ends_ok_and_proves_what_can_be_proved(finished: tuple[Run, Path]) -> None:
    (record,), folder = finished[0].launches, finished[1]
    assert (record.state, record.error) == ("ok", None)
    assert (record.fidelity, record.backend, len(record.step_times_s)) == ("emulated", "emulated", 2)
    proof = record.proof
    assert proof is not None
    assert proof.announced == proof.traced
    assert {one.op for one in proof.announced} == {"all_gather", "all_reduce", "reduce_scatter"}
    assert proof.loss_parity is None
    assert proof.parity_note.startswith("emulated: data from other ranks is made up")
    assert proof.parameters_sha256 == ""
    assert len(record.losses) >= record.case.protocol.total_steps
    assert {read_timeline(folder / trace).rank for trace in record.traces} == {0, 1}
    # What the links take for the bytes that were announced, at a gigabyte per second within a node and half of that
    # between nodes, is the least that the traced communication can take.
    sent = sum(one.bytes for one in proof.announced) * 7 / 8
    assert (record.metrics["comm_s"] or 0) >= sent / 1e9


def test_no_table_and_no_page_shows_a_loss(finished: tuple[Run, Path]) -> None:
    run, folder = finished
    page = folder / "dashboard.html"
    write_dashboard(gather(run), page)
    text = page.read_text()
    assert 'id="losses"' not in text
    assert ": one real rank; the other ranks are modelled" in text
    for row in as_rows(gather(run)):
        assert (row["fidelity"], row["loss_parity"], row["bit_identical_to_ddp"]) == ("emulated", None, None)
        assert row["cluster"] is not None
    assert "loss" not in printed.text(run_answer(gather(run)), verbose=True)
    shown = f"{run.launches[0].losses[-1]:.6g}"
    assert shown not in text


def test_the_suites_that_ship_expand() -> None:
    every = {name: load_suite(find_suite(name)).cases() for name in ("emulated", "emulated_gpu")}
    assert {(c.job.gpus, c.processes, c.protocol.device, c.job.cluster) for c in every["emulated"]} == {
        (8, 1, "cpu", "dgx-h100"), (64, 1, "cpu", "dgx-h100"),
    }  # fmt: skip
    assert len(every["emulated"]) == 16
    assert {(c.job.gpus, c.protocol.device, c.job.precision, c.job.global_batch) for c in every["emulated_gpu"]} == {
        (8, "cuda", "bf16", 8), (64, "cuda", "bf16", 64), (256, "cuda", "bf16", 256),
    }  # fmt: skip
    assert {c.job.strategy for c in every["emulated_gpu"]} == {
        "ddp", "fsdp2", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp",
    }  # fmt: skip
