"""A rank on a GPU that fails: its peers, which wait for it in NCCL, end with it, and the case says what happened."""

from pathlib import Path

import msgspec
import pytest

from refshard.fakecuda import is_active
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import run_suite
from refshard.quantities import MIB
from tests.measure.fake_gpus import FakeGpus
from tests.measure.fakes import ENVIRONMENT, Silent, make_suite
from tests.measure.faults import planting

TIME_LIMIT_S = 240.0
"""Less than what NCCL waits for a peer: ranks that wait for it to give up are out of time."""
ENDS = {"fail": "rank 1: ZeroDivisionError: planted", "kill": "rank 1 ended with signal 9 (SIGKILL)"}

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("count", "place", "deed"),
    [
        pytest.param(2, "forward", "fail", marks=pytest.mark.gpu(count=2)),
        pytest.param(2, "backward", "kill", marks=pytest.mark.gpu(count=2)),
        pytest.param(8, "backward", "fail", marks=pytest.mark.gpu(count=8)),
    ],
)
def test_the_case_fails_with_the_cause_and_is_not_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, place: str, deed: str
) -> None:
    for name, value in planting(f"refshard-yafsdp 1 {place} {deed}").items():
        monkeypatch.setenv(name, value)
    suite = make_suite(
        matrix={"strategy": ["refshard-yafsdp"], "gpus": [count], "model": ["llama-tiny"]},
        case={"global_batch": count, "seq_len": 16, "device": "cuda", "time_limit_s": TIME_LIMIT_S},
    )
    gpus = {"gpus": ("NVIDIA H100 80GB HBM3",) * count, "gpu_memory_bytes": (MIB,) * count}  # for no reference
    node = msgspec.structs.replace(ENVIRONMENT, **gpus)
    launcher = FakeGpus() if is_active() else LocalLauncher()
    run = run_suite(suite, tmp_path / "run", launcher, Silent(), node)
    (record,) = (record for record in run.launches if record.case.job.strategy == "refshard-yafsdp")
    assert (record.state, record.error) == ("failed", ENDS[deed])
