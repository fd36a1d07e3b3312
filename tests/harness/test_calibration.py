"""Calibration: what is fitted to samples whose law is known, what a profile is built from, and a real run of it."""

import math
import random
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.commands import calibrate as command
from refshard.costs import attention_seconds, collective_cost, group_shape, product_seconds
from refshard.errors import LaunchError, SpecError
from refshard.harness.calibrate import calibrate, plan_calibration
from refshard.harness.calibration import fit, kernels
from refshard.harness.calibration.collectives import divisible, sizes
from refshard.harness.calibration.profile import build_profile
from refshard.harness.calibration.samples import (
    CALIBRATION_FILE,
    Beside,
    Calibration,
    RankSamples,
    Timed,
    TimedCollective,
    median_of,
    samples_file,
)
from refshard.harness.calibration.stopwatch import CpuStopwatch
from refshard.harness.environment import available_cores
from refshard.harness.launchers.base import Job, Launcher, LaunchOutcome
from refshard.records import Environment
from refshard.report.calibration import terminal_profile
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import COLLECTIVES, load_cluster
from refshard.specs.hardware import AttentionPoint
from refshard.specs.suite import NetworkSpec
from tests.harness.commandline import processes_of, refshard, status_of

KERNEL_S, RATE, BYTES_PER_S, OVERHEAD_S = 5e-6, 9e10, 2e10, 3e-5
SHAPES = [(t, d, f) for t in (64, 256, 1024) for d, f in ((256, 256), (512, 1280), (1024, 4096))]


def products(noise: float = 0.0) -> list[Timed]:
    """Products that take what the law says, with the numbers above, and up to ``noise`` more."""
    drawn, found = random.Random(0), []
    for t, d, f in SHAPES:
        flops, nbytes = 2.0 * t * d * f, 4.0 * (t * d + d * f + t * f)
        seconds = KERNEL_S + OVERHEAD_S + flops / RATE + nbytes / BYTES_PER_S
        found.append(Timed(dtype="fp32", flops=flops, bytes=nbytes, seconds=seconds * (1 + noise * drawn.random())))
    return found


def test_the_law_of_products_is_found_again() -> None:
    fitted = fit.fit_products(products(), KERNEL_S)
    assert fitted.rate.flops_per_s == pytest.approx(RATE, rel=2e-3)
    assert fitted.rate.bytes_per_s == pytest.approx(BYTES_PER_S, rel=2e-3)
    assert fitted.rate.overhead_s == pytest.approx(OVERHEAD_S, rel=2e-3)
    assert fitted.typical_error < 1e-3
    assert fit.fit_products(products(noise=0.2), KERNEL_S).typical_error < 0.1


def test_the_best_product_is_the_peak_where_it_beats_the_law() -> None:
    lucky = Timed(dtype="fp32", flops=1e9, bytes=0.0, seconds=1e9 / (2 * RATE))
    rate = fit.fit_products([*products(), lucky], KERNEL_S).rate
    assert rate.peak == pytest.approx(2 * RATE, rel=1e-3)
    assert rate.efficiency < 0.8


def test_a_link_is_fitted_to_all_gathers() -> None:
    """Four ranks: three hops of 10 us, three quarters of the bytes at 1 GB/s."""
    timed = [
        TimedCollective(op="all_gather", ranks=4, nodes=1, bytes=size, seconds=(3e-5 + 0.75 * size / 1e9,) * 3)
        for size in (2**10, 2**16, 2**22, 2**26)
    ]
    link = fit.fit_link(fit.slowest_ranks([timed] * 4), ranks=4, nodes=1)
    assert link is not None
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert link.latency_s == pytest.approx(1e-5, rel=1e-3)
    assert fit.fit_link(fit.slowest_ranks([timed] * 4), ranks=2, nodes=1) is None


def test_a_collective_takes_the_median_of_its_slowest_ranks() -> None:
    ranks = [
        [TimedCollective(op="all_reduce", ranks=2, nodes=1, bytes=8, seconds=seconds)]
        for seconds in ((1.0, 5.0, 1.0), (2.0, 1.0, 3.0))
    ]
    assert fit.slowest_ranks(ranks)[0].seconds == 3.0


def test_exponentials_bound_a_kernel_only_where_memory_does_not() -> None:
    def silu(seconds: float) -> list[Timed]:
        return [Timed(dtype="fp32", bytes=800.0, transcendentals=100.0, seconds=seconds)]

    assert fit.transcendental_per_s(silu(10.0), 0.0, memory_bytes_per_s=100.0) == pytest.approx(10.0)
    assert fit.transcendental_per_s(silu(8.5), 0.0, memory_bytes_per_s=100.0) == 0.0


def calibration(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "ranks": 2, "threads": 1, "nodes": 1, "device": "cpu", "quick": True, "sweeps": 1, "cpu_clock": True,
    }  # fmt: skip
    return Calibration(**fields | changes)


def rank_samples(rank: int, ranks: int = 2, nodes: int = 1, **changes: Any) -> RankSamples:
    """What a rank would leave that follows the law of products, and whose collectives take 1 ms and 1 ns a byte."""
    fields: dict[str, Any] = {
        "rank": rank,
        "device": "cpu",
        "backend": "gloo",
        "memory_bytes": 2**33,
        "multiprocessors": 0,
        "kernel_s": KERNEL_S,
        "host_s": KERNEL_S,
        "products": tuple(products()),
        "attention": (AttentionPoint(dtype="fp32", head_dim=64, seq_len=128, forward_s=1e-8, backward_s=3e-8),),
        "moves": (Timed(dtype="fp32", bytes=3e6, seconds=KERNEL_S + 1e-4),),
        "transcendentals": (Timed(dtype="fp32", bytes=2e6, transcendentals=2.5e5, seconds=KERNEL_S + 1e-3),),
        "optimizer_s_per_parameter": 7e-10,
        "first_touch_s_per_byte": 4e-10,
        "collectives": tuple(
            TimedCollective(op=op, ranks=ranks, nodes=nodes, bytes=size, seconds=(1e-3 + size * 1e-9,) * 3)
            for op in COLLECTIVES
            for size in (2**10, 2**22)
        ),
        "beside": Beside(compute=0.75, communication=0.5),
        "busy": 1.0,
    }
    return RankSamples(**fields | changes)


def test_a_profile_says_what_was_measured() -> None:
    profile = build_profile(calibration(), [rank_samples(0), rank_samples(1)], "a CPU", "on a CPU, today: refshard")
    hardware = profile.accelerator
    assert (profile.ranks_per_node, profile.nodes, profile.library) == (2, 1, "gloo")
    assert (profile.compute_beside_communication, profile.communication_beside_compute) == (0.75, 0.5)
    assert hardware.memory_bytes_per_s == pytest.approx(3e10)
    assert hardware.transcendental_per_s == pytest.approx(2.5e8)
    assert hardware.optimizer_bytes_per_s == pytest.approx(28 / 7e-10)
    assert hardware.first_touch_bytes_per_s == pytest.approx(2.5e9)
    for sample in products():
        taken = product_seconds(hardware, "fp32", sample.flops, sample.bytes)
        assert taken == pytest.approx(sample.seconds, rel=5e-3)
    attention = attention_seconds(hardware, "fp32", heads=2, seq_len=128, head_dim=64)
    assert attention == pytest.approx(KERNEL_S + 128**2 * 1e-8)
    cost = collective_cost(profile, "exchange", 2**22, group_shape(profile, range(2)))
    assert cost.seconds == pytest.approx(1e-3 + 2**22 * 1e-9, rel=1e-3)
    assert profile.sources["within"].startswith("measured on a CPU, today: refshard")
    assert "other work" not in profile.about


def slower(samples: RankSamples, by: float) -> RankSamples:
    """The same, everything ``by`` times as slow."""
    replace = msgspec.structs.replace
    return replace(
        samples,
        kernel_s=samples.kernel_s * by,
        host_s=samples.host_s * by,
        products=tuple(replace(p, seconds=p.seconds * by) for p in samples.products),
        attention=tuple(
            replace(p, forward_s=p.forward_s * by, backward_s=p.backward_s * by) for p in samples.attention
        ),
        moves=tuple(replace(p, seconds=p.seconds * by) for p in samples.moves),
        transcendentals=tuple(replace(p, seconds=p.seconds * by) for p in samples.transcendentals),
        optimizer_s_per_parameter=samples.optimizer_s_per_parameter * by,
        first_touch_s_per_byte=samples.first_touch_s_per_byte * by,
        collectives=tuple(replace(c, seconds=tuple(s * by for s in c.seconds)) for c in samples.collectives),
        beside=Beside(compute=samples.beside.compute / by, communication=samples.beside.communication / by),
        busy=samples.busy / by,
    )


def test_a_sweep_that_other_work_hit_leaves_no_mark() -> None:
    calm = rank_samples(0)
    hit = median_of([calm, slower(calm, 3.0), calm])
    profiles = [build_profile(calibration(ranks=1), [samples], "a CPU", "today") for samples in (calm, hit)]
    assert profiles[0] == profiles[1]
    assert {len(c.seconds) for c in hit.collectives} == {9}, "the repeats of all sweeps"
    assert median_of([calm, slower(calm, 2.0), slower(calm, 3.0)]) != calm


def test_a_link_that_lets_bursts_pass_has_the_bandwidth_of_what_is_large() -> None:
    """Up to 256 KiB go at 4 GB/s, the rest at 250 MB/s."""
    timed = [
        TimedCollective(
            op="all_gather", ranks=2, nodes=2, bytes=size,
            seconds=(1e-4 + min(size / 2, 2**18) / 4e9 + max(size / 2 - 2**18, 0) / 2.5e8,),
        )
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
    ]  # fmt: skip
    link = fit.fit_link(fit.slowest_ranks([timed]), ranks=2, nodes=2)
    assert link is not None
    assert link.bytes_per_s == pytest.approx(2.5e8, rel=0.01)
    assert link.latency_s == pytest.approx(1e-4, rel=0.05)


def test_a_profile_says_that_other_work_disturbed_it() -> None:
    profile = build_profile(calibration(), [rank_samples(0), rank_samples(1, busy=0.5)], "a CPU", "today")
    assert "had its core for 50% of the time only" in profile.about


def test_hosts_with_a_rank_each_have_nothing_within() -> None:
    both = [rank_samples(rank, nodes=2) for rank in range(2)]
    profile = build_profile(calibration(nodes=2), both, "a CPU", "today")
    assert profile.between == profile.within
    assert profile.sources["within"] == "as between: no two ranks share a host"
    assert profile.of_nodes(8).world_size == 8


def test_a_single_rank_measures_no_collective() -> None:
    alone = rank_samples(0, collectives=(), beside=Beside(compute=1.0, communication=1.0))
    profile = build_profile(calibration(ranks=1), [alone], "a CPU", "today")
    assert not profile.measured
    assert collective_cost(profile, "all_reduce", 2**30, group_shape(profile, [0])).seconds == 0
    assert "fp32 matrix products" in terminal_profile(profile)


class Scripted(Launcher):
    """Starts nothing, and leaves what ranks would have left."""

    def __init__(self, launch: LaunchOutcome, ranks: int) -> None:
        self._launch, self._ranks = launch, ranks

    def launch(self, job: Job, folder: Path, on_progress: Any) -> LaunchOutcome:
        asked = msgspec.json.decode((folder / CALIBRATION_FILE).read_bytes(), type=Calibration)
        assert (job.program, job.processes) == ("calibration", asked.ranks)
        for rank in range(self._ranks):
            samples_file(folder, rank).write_bytes(msgspec.json.encode(rank_samples(rank)))
        return self._launch

    def check(self, case: CaseSpec, *, oversubscribe: bool) -> None:
        raise AssertionError("a calibration has no case")

    def environment(self, threads: int, beside: Path, on_progress: Any) -> Environment:
        raise AssertionError("a calibration is of what it runs on")


def test_the_driver_builds_a_profile_of_what_ranks_left() -> None:
    profile = calibrate(calibration(), Scripted(LaunchOutcome(), ranks=2), print)
    assert profile.measured
    assert ", torch " in profile.accelerator.sources["matmul"]


@pytest.mark.parametrize(
    ("launch", "left", "message"),
    [
        (
            LaunchOutcome(timed_out=True),
            2,
            "calibrate: the ranks did not end within 1200 s and were ended; try fewer --sweeps, or --quick",
        ),
        (
            LaunchOutcome(
                failed_rank=1, error="rank 1 ended with exit status 1", log_tail=("Traceback", "ValueError: no")
            ),
            1,
            "calibrate: rank 1 ended with exit status 1 (ValueError: no); correct that, or lower --ranks",
        ),
        (LaunchOutcome(), 1, "calibrate: a rank left no result (it wrote nothing); correct that, or lower --ranks"),
    ],
)
def test_a_launch_that_failed_is_told_in_a_line(launch: LaunchOutcome, left: int, message: str) -> None:
    with pytest.raises(LaunchError) as failed:
        calibrate(calibration(), Scripted(launch, left), print)
    assert str(failed.value) == message


TWO = NetworkSpec(hosts=2, rate="2gbit")


def test_what_is_measured_by_default() -> None:
    cores = available_cores()
    plan = plan_calibration(ranks=None, threads=1, network=None, device="cpu", quick=False)
    assert plan == calibration(ranks=cores, quick=False, sweeps=3)
    assert plan_calibration(ranks=4 * cores, threads=1, network=None, device="cpu", quick=True).cpu_clock is False
    over = plan_calibration(ranks=None, threads=1, network=TWO, device="auto", quick=True)
    assert (over.nodes, over.per_node) == (2, max(cores // 2, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"ranks": 0}, "ranks must be >= 1, got 0"),
        ({"sweeps": 0}, "sweeps must be from 1 to 99, got 0"),
        ({"ranks": 3, "network": TWO}, "ranks must be a multiple of the network's 2 hosts, got 3"),
        ({"device": "cuda", "network": TWO}, "device"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"ranks": None, "threads": 1, "network": None, "device": "cpu", "quick": True}
    with pytest.raises(SpecError) as refused:
        plan_calibration(**{**asked, **changes})
    assert message in str(refused.value)


def test_a_stopwatch_gives_the_median_of_calls_on_other_operands_each_time() -> None:
    seen: list[int] = []
    watch = CpuStopwatch(0.0, 3, cpu_clock=True)
    assert 0 < watch.seconds(lambda index: seen.append(index) or math.factorial(2000)) < 0.1  # type: ignore[func-returns-value]
    assert seen == list(range(len(seen))), "each call has a number of its own"
    assert 0 < watch.busy <= 1


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_whatever_the_ranks_share_is_shared_evenly(ranks: int) -> None:
    for device in ("cpu", "cuda"):
        for size in (*sizes(device, quick=False), *sizes(device, quick=True)):
            numel = divisible(size // 4, ranks)
            assert numel % ranks == 0
            assert numel >= ranks
    assert max(sizes("cuda", quick=False)) == 2**30, "as large as a gathered layer"


def test_shapes_are_those_that_training_meets() -> None:
    for device in ("cpu", "cuda"):
        quick, thorough = (kernels.shapes(device, quick=q) for q in (True, False))
        assert len(quick.products) < len(thorough.products)
        assert all(min(shape) >= 64 for shape in thorough.products)


@pytest.mark.processes
def test_calibrate_measures_this_machine_and_writes_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.toml"
    done = refshard("calibrate", "--quick", "--ranks", "2", "--device", "cpu", "--out", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"profile: {path}")
    assert "busbw" in done.stdout
    made = load_cluster(str(path))
    assert (made.ranks_per_node, made.nodes, made.library) == (2, 1, "gloo")
    hardware = made.accelerator
    assert 1e9 < hardware.matmul["fp32"].flops_per_s < 1e13
    assert 1e8 < hardware.memory_bytes_per_s < 1e12
    assert 1e-7 < hardware.kernel_s < 1e-2
    assert {m.op for m in made.measured} == set(COLLECTIVES)
    assert "--quick" in tomllib.loads(path.read_text())["sources"]["measured"]
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.toml"]
    assert not processes_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "2gbit"}, "network must be hosts, 'x' and what each can send, such as 2x2gbit, got '2gbit'"),
        ({"network": "2x2gb"}, "network: rate must be a whole number from 1 to 9999 and 'mbit' or 'gbit'"),
        ({"output": Path("/proc/no/such.toml")}, "out: /proc/no/such.toml cannot be written"),
        ({"output": Path("/tmp")}, "out: /tmp is a folder; name the file to write"),
        ({"output": Path()}, "out: . is a folder; name the file to write"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {
        "output": None, "ranks": None, "threads": 1, "network": None, "device": "cpu", "quick": True,
    }  # fmt: skip
    with pytest.raises(SpecError) as refused:
        command.calibrate(**{**asked, **changes})
    assert str(refused.value).startswith(message)


def test_a_device_is_one_of_three() -> None:
    assert command.device("cpu") == "cpu"
    with pytest.raises(SpecError, match="device must be one of auto, cpu, cuda, got 'tpu'"):
        command.device("tpu")


@pytest.mark.parametrize(
    ("given", "measured", "wrong"),
    [
        (["--aa", "--device", "cpu", "--json", "--quick"], "with it, noise", "--device, --quick"),
        (["--quick", "--json", "--suite", "gate"], "without it, a cluster", "--json, --suite"),
    ],
)
def test_what_measures_noise_and_what_measures_a_cluster_are_not_mixed(
    given: list[str], measured: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["calibrate", *given], capsys) == (
        2,
        f"refshard: aa: {measured} is measured; leave out {wrong}\n",
    )
