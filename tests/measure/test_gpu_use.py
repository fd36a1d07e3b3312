"""Samples of GPUs become means, extremes and warnings about throttling."""

from threading import Event

import pytest
import torch

from refshard.measure.assemble import of_all_hosts, throttle_warnings
from refshard.measure.load import sampled, use_of, watched_gpus
from refshard.measure.nvml import GpuReading
from refshard.records import GpuUse
from tests.measure.sensors import FakeSensors

COOL = GpuReading(power_w=400.0, sm_clock_mhz=1980)
HOT = GpuReading(power_w=700.0, sm_clock_mhz=1400, throttled=("power cap",))


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


def test_an_error_in_the_timed_steps_passes_through_and_ends_the_sampling() -> None:
    with pytest.raises(MemoryError), sampled(FakeSensors([[HOT]]), interval_s=3600) as found:
        raise MemoryError
    assert found == []


def test_without_sensors_nothing_is_seen() -> None:
    with sampled(None) as found:
        pass
    assert found == []


def test_a_cpu_has_no_gpus_to_watch() -> None:
    with watched_gpus(torch.device("cpu")) as found:
        pass
    assert found == []


def test_hosts_are_counted_in_the_order_of_their_ranks() -> None:
    one, other = use_of(0, [COOL]), use_of(0, [HOT])
    assert [(use.host, use.throttled) for use in of_all_hosts([(one,), (), (other,), ()])] == [
        (0, {}),
        (1, {"power cap": 1}),
    ]


def test_throttling_is_told_by_gpu_and_by_host_where_there_are_several() -> None:
    hot = use_of(3, [COOL, HOT])
    assert throttle_warnings([use_of(0, [COOL]), hot]) == (
        "GPU 3 was throttled (power cap) during the measured steps: in 1 of 2 samples",
    )
    assert throttle_warnings(of_all_hosts([[use_of(0, [COOL])], [use_of(1, [HOT])]])) == (
        "GPU 1 of host 1 was throttled (power cap) during the measured steps: in 1 of 1 sample",
    )
