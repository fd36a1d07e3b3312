"""How busy the machine was, and how its GPUs ran: what ranks saw becomes figures, and looking changes nothing else."""

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from refshard.measure.load import RankLoad, load_of, probe, sampled, use_of, watched_gpus, watched_load
from refshard.measure.nvml import GpuReading
from refshard.measure.rank import RankResult, measure
from refshard.records import GpuUse
from refshard.specs.case import Case
from tests.distributed.ranks import run_ranks
from tests.fakecuda.fresh import see
from tests.measure.sensors import FakeSensors

COOL = GpuReading(power_w=400.0, sm_clock_mhz=1980)
HOT = GpuReading(power_w=700.0, sm_clock_mhz=1400, throttled=("power cap",))


def rank(
    own: float, *, host: str = "a", probes: tuple[float, float] = (0.05, 0.05), busy: float | None = 4.0
) -> RankLoad:
    """A rank that computed for ``own`` of 2 s, during which its host's cores were busy for ``busy`` in all."""
    return RankLoad(
        host=host, cores=4, probe_before_s=probes[0], probe_after_s=probes[1], wall_s=2.0, own_cpu_s=own,
        host_cpu_s=busy,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "other_cores", "probes"),
    [
        ([rank(1.5), rank(1.0)], (4.0 - 2.5) / 2.0, (0.05, 0.05)),
        # The slowest rank and the busiest host count.
        ([rank(2.0, probes=(0.04, 0.09)), rank(1.0, host="b", probes=(0.06, 0.05))], 1.5, (0.06, 0.09)),
        ([rank(4.1)], 0.0, (0.05, 0.05)),  # clocks that disagree
        ([rank(1.0, busy=None)], None, (0.05, 0.05)),
    ],
)
def test_what_the_ranks_of_a_host_did_not_use_is_of_others(
    ranks: list[RankLoad], other_cores: float | None, probes: tuple[float, float]
) -> None:
    found = load_of(ranks)
    assert found is not None
    assert found.other_cores == (other_cores and pytest.approx(other_cores))
    assert (found.probe_before_s, found.probe_after_s, found.cores) == (*probes, 4)


def test_a_rank_that_did_not_look_leaves_nothing_known() -> None:
    assert load_of([rank(1.0), None]) is load_of([]) is None


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


@pytest.mark.parametrize(
    "watch", [lambda: watched_load(torch.device("cpu")), lambda: sampled(FakeSensors([[HOT]]), interval_s=3600)]
)
def test_an_error_in_the_timed_steps_passes_through(watch: Callable[[], AbstractContextManager[list[Any]]]) -> None:
    with pytest.raises(MemoryError), watch() as found:
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


def test_samples_become_means_extremes_and_counts() -> None:
    cool = GpuReading(power_w=400.0, sm_clock_mhz=2000)
    assert use_of(3, [cool, HOT, HOT]) == GpuUse(
        gpu=3, samples=3, power_w=600.0, max_power_w=700.0, sm_clock_mhz=1600.0, min_sm_clock_mhz=1400,
        throttled={"power cap": 2},
    )  # fmt: skip


def test_what_no_sample_tells_is_none() -> None:
    assert use_of(0, [GpuReading()]) == GpuUse(gpu=0, samples=1)


class Told(FakeSensors):
    """Says when the last GPU has been read ``rounds`` times."""

    def __init__(self, readings: list[list[GpuReading]], rounds: int) -> None:
        super().__init__(readings)
        self.done, self._left = Event(), rounds

    def reading(self, gpu: int) -> GpuReading:
        if gpu == self.count - 1:
            self._left -= 1
            if self._left == 0:
                self.done.set()
        return super().reading(gpu)


def test_gpus_are_sampled_until_the_steps_end() -> None:
    sensors = Told([[COOL], [COOL, HOT]], rounds=2)
    with sampled(sensors, interval_s=0.001) as found:
        assert sensors.done.wait(timeout=60)
        assert found == []
    cool, hot = found
    assert (cool.gpu, cool.throttled, cool.power_w) == (0, {}, 400.0)
    assert hot.gpu == 1
    assert hot.samples >= 2
    assert hot.throttled == {"power cap": hot.samples - 1}


def test_steps_shorter_than_an_interval_have_one_sample() -> None:
    with sampled(FakeSensors([[HOT]]), interval_s=3600) as found:
        pass
    assert found == [use_of(0, [HOT])]


@pytest.mark.parametrize("watch", [lambda: sampled(None), lambda: watched_gpus(torch.device("cpu"))])
def test_without_sensors_or_gpus_nothing_is_seen(watch: Callable[[], AbstractContextManager[list[GpuUse]]]) -> None:
    with watch() as found:
        pass
    assert found == []
