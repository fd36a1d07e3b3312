"""How busy the machine was: what ranks saw becomes one figure, and looking changes nothing else."""

import gzip
import json
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from refshard.measure.load import RankLoad, load_of, probe, watched_load
from refshard.measure.timing import RankResult, measure
from refshard.specs.case import Case
from tests.distributed.ranks import run_ranks
from tests.fakecuda.fresh import see


def rank(
    own: float, *, host: str = "a", probes: tuple[float, float] = (0.05, 0.05), busy: float | None = 4.0
) -> RankLoad:
    """A rank that computed for ``own`` of 2 s, during which its host's cores were busy for ``busy`` in all."""
    return RankLoad(
        host=host, cores=4, probe_before_s=probes[0], probe_after_s=probes[1], wall_s=2.0, own_cpu_s=own,
        host_cpu_s=busy,
    )  # fmt: skip


def test_what_the_ranks_of_a_host_did_not_use_is_of_others() -> None:
    found = load_of([rank(1.5), rank(1.0)])
    assert found is not None
    assert found.other_cores == pytest.approx((4.0 - 2.5) / 2.0)
    assert found.cores == 4


def test_the_slowest_rank_and_the_busiest_host_count() -> None:
    found = load_of([rank(2.0, probes=(0.04, 0.09)), rank(1.0, host="b", probes=(0.06, 0.05))])
    assert found is not None
    assert (found.probe_before_s, found.probe_after_s) == (0.06, 0.09)
    assert found.other_cores == pytest.approx(1.5)


def test_clocks_that_disagree_make_no_negative_load() -> None:
    found = load_of([rank(4.1)])
    assert found is not None
    assert found.other_cores == 0.0


def test_what_the_system_does_not_tell_is_none() -> None:
    found = load_of([rank(1.0, busy=None)])
    assert found is not None
    assert found.other_cores is None
    assert load_of([rank(1.0), None]) is None
    assert load_of([]) is None


def test_a_watched_stretch_is_probed_before_and_after() -> None:
    with watched_load(torch.device("cpu")) as found:
        assert found == []
    (seen,) = found
    assert seen.probe_before_s > 0
    assert seen.probe_after_s > 0
    assert seen.host_cpu_s is None or seen.host_cpu_s >= 0


def test_a_probe_leaves_random_numbers_and_gradients_alone() -> None:
    state = torch.random.get_rng_state()
    probe(torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_an_error_in_the_timed_steps_passes_through() -> None:
    with pytest.raises(MemoryError), watched_load(torch.device("cpu")) as found:
        raise MemoryError
    assert found == []


@pytest.mark.parametrize("mode", ["host", "dry"])
@pytest.mark.processes
def test_the_fake_device_is_not_probed(mode: Literal["host", "dry"]) -> None:
    assert see("tests.measure.load_checks", mode=mode)("watched") == {
        "seen": 0, "gpus": 0, "allocated": 0, "peak": 0,
    }  # fmt: skip


@pytest.mark.processes
def test_the_fake_device_has_memory_and_no_sensors() -> None:
    found = see("tests.measure.load_checks", mode="dry")("described")
    assert set(found["gpu_memory_bytes"]) == {85_018_903_838}
    assert found["tf32"] is False
    assert not found.keys() & {"gpu_driver", "gpu_settings", "gpu_throttled"}


def measured(trace: Path) -> RankResult:
    case = Case.of(
        strategy="single", gpus=1, model="llama-tiny", global_batch=1, seq_len=16, measured_steps=3,
        traced_steps=1,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    return measure(case, dist.group.WORLD, torch.device("cpu"), trace, lambda *_: None)


@pytest.mark.processes
def test_a_rank_says_what_it_saw_and_no_probe_is_in_its_trace_or_census(tmp_path: Path) -> None:
    """No operator of a training step has the probe's matrices."""
    trace = tmp_path / "trace.json.gz"
    result = run_ranks(1, measured, trace)[0]
    assert result.load is not None
    assert result.load.wall_s >= sum(result.step_times_s)
    assert result.load.own_cpu_s > 0
    assert "aten.mm.out" not in result.operators
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names
    assert "aten::ones" not in names
