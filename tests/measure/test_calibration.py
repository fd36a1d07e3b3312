"""Calibration: what is fitted to samples whose law is known, and what a profile is built from."""

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands import calibrate as command
from refshard.costs import attention_seconds, collective_cost, group_shape, product_seconds
from refshard.errors import LaunchError, SpecError
from refshard.measure.calibration import kernels
from refshard.measure.calibration import profile as fit
from refshard.measure.calibration.collectives import Agreement, FailedOnSomeRankError, divisible, traffic
from refshard.measure.calibration.kernels import Call, CpuStopwatch, Stopwatch, settled
from refshard.measure.calibration.profile import TooLittleError, build_profile, measure, plan_calibration, read_profile
from refshard.measure.calibration.rank import pieces_of
from refshard.measure.calibration.samples import (
    DTYPES,
    ELSEWHERE,
    Beside,
    Calibration,
    Operations,
    Pace,
    Piece,
    Pieces,
    RankSamples,
    Sample,
    Timed,
    TimedAttention,
    TimedCollective,
    collective_piece,
    groups_of,
    of_ranks,
    of_sweeps,
    ops_of,
    samples_file,
)
from refshard.measure.launchers.base import LaunchOutcome, Program
from refshard.measure.launchers.torchrun import Place
from refshard.measure.worker import request_file
from refshard.records import GpuUse
from refshard.report.calibration import profile_answer
from refshard.resources import available_cores
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.hardware import Dtype
from refshard.specs.suite import NetworkSpec
from tests.measure.calibrations import calibration
from tests.measure.commandline import status_of
from tests.measure.fakes import StandIn
from tests.report.printed import as_json, notes, rows, tables, text

KERNEL_S, RATE, BYTES_PER_S, OVERHEAD_S = 5e-6, 9e10, 2e10, 3e-5
SHAPES = [(t, d, f) for t in (64, 256, 1024) for d, f in ((256, 256), (512, 1280), (1024, 4096))]


def products(noise: float = 0.0, dtype: Dtype = "fp32") -> list[Timed]:
    """Products that take what the law says, with the numbers above, and up to ``noise`` more."""
    drawn, found = random.Random(0), []
    for t, d, f in SHAPES:
        flops, nbytes = 2.0 * t * d * f, 4.0 * (t * d + d * f + t * f)
        seconds = KERNEL_S + OVERHEAD_S + flops / RATE + nbytes / BYTES_PER_S
        found.append(Timed(dtype=dtype, flops=flops, bytes=nbytes, seconds=seconds * (1 + noise * drawn.random())))
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


def gathers(ranks: int, nodes: int, hop_s: float, bytes_per_s: float) -> list[TimedCollective]:
    """All-gathers by the law: ``ranks - 1`` hops, and what each rank lacks at this rate."""
    return [
        TimedCollective(
            op="all_gather", ranks=ranks, nodes=nodes, bytes=size,
            seconds=((ranks - 1) * (hop_s + size / ranks / bytes_per_s),) * 3,
        )
        for size in (2**10, 2**16, 2**22, 2**26)
    ]  # fmt: skip


def test_a_link_is_fitted_to_all_gathers() -> None:
    """Four ranks: three hops of 10 us, three quarters of the bytes at 1 GB/s."""
    measured = fit.median_collectives(gathers(4, 1, 1e-5, 1e9))
    link = fit.fit_link(measured, ranks=4, nodes=1)
    assert link is not None
    assert link.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert link.latency_s == pytest.approx(1e-5, rel=1e-3)
    assert fit.fit_link(measured, ranks=2, nodes=1) is None
    assert fit.fit_link(measured[:1], ranks=4, nodes=1) is None, "one size tells no bandwidth"


def test_a_collective_takes_the_median_of_its_slowest_ranks() -> None:
    ranks = [
        {"a": Piece(samples=(TimedCollective(op="all_reduce", ranks=2, nodes=1, bytes=8, seconds=seconds),))}
        for seconds in ((1.0, 5.0, 1.0), (2.0, 1.0, 3.0))
    ]
    (slowest,) = of_ranks(ranks)["a"].samples
    assert isinstance(slowest, TimedCollective)
    assert slowest.seconds == (2.0, 5.0, 3.0)
    assert fit.median_collectives([slowest])[0].seconds == 3.0


def test_exponentials_bound_a_kernel_only_where_memory_does_not() -> None:
    def silu(seconds: float) -> list[Timed]:
        return [Timed(dtype="fp32", bytes=800.0, transcendentals=100.0, seconds=seconds)]

    assert fit.transcendental_per_s(silu(10.0), 0.0, memory_bytes_per_s=100.0) == pytest.approx(10.0)
    assert fit.transcendental_per_s(silu(8.5), 0.0, memory_bytes_per_s=100.0) == 0.0


BURST = 1.25
"""How many times as fast everything is in bursts."""


def pieces(ranks: int = 2, nodes: int = 1) -> Pieces:
    """What a sweep finds that follows the law of products, and whose collectives take 1 ms and 1 ns a byte."""
    found: dict[str, tuple[Sample, ...]] = {
        "operations": (Operations(kernel_s=KERNEL_S, host_s=KERNEL_S),),
        "elementwise": (
            Timed(dtype="fp32", bytes=3e6, seconds=KERNEL_S + 1e-4),
            Timed(dtype="fp32", bytes=2e6, transcendentals=2.5e5, seconds=KERNEL_S + 1e-3),
        ),
        "optimizer": (Timed(dtype="fp32", bytes=28e6, seconds=7e-4),),
        "new memory": (Timed(dtype="fp32", bytes=1e9, seconds=0.4),),
        "products beside collectives": (Beside(compute=0.75, communication=0.5),),
    }
    for dtype in DTYPES:
        attention = (TimedAttention(dtype=dtype, head_dim=64, seq_len=128, forward_s=1e-8, backward_s=3e-8),)
        sustained: dict[str, tuple[Sample, ...]] = {
            f"{dtype} products": tuple(products(dtype=dtype)),
            f"{dtype} attention": attention,
        }
        found |= {**sustained, **{f"{name} in bursts": faster(samples, BURST) for name, samples in sustained.items()}}
    for shape in groups_of(ranks, nodes):
        for op in ops_of(calibration(ranks=ranks), shape[0]):
            found[collective_piece(op, *shape)] = tuple(
                TimedCollective(op=op, ranks=shape[0], nodes=shape[1], bytes=size, seconds=(1e-3 + size * 1e-9,) * 3)
                for size in (2**10, 2**22)
            )
    if ranks == 1:
        del found["products beside collectives"]
    assert set(found) == set(pieces_of(calibration(ranks=ranks), nodes))
    return {name: Piece(samples=samples) for name, samples in found.items()}


def faster(samples: tuple[Sample, ...], by: float) -> tuple[Sample, ...]:
    """The same, everything ``by`` times as fast."""
    return tuple(
        msgspec.structs.replace(s, seconds=tuple(t / by for t in s.seconds))
        if isinstance(s, TimedCollective)
        else msgspec.structs.replace(s, **{field: getattr(s, field) / by for field in s.times})
        for s in samples
    )


def rank_samples(rank: int, *sweeps: Pieces, nodes: int = 1, **changes: Any) -> RankSamples:
    """What a rank leaves after ``sweeps``; one of two ranks if none is given."""
    fields: dict[str, Any] = {
        "rank": rank, "nodes": nodes, "machine": "a CPU", "torch": "2.13", "backend": "gloo", "memory_bytes": 2**33,
        "sweeps": sweeps or (pieces(2, nodes),),
    }  # fmt: skip
    return RankSamples(**fields | changes)


def test_a_profile_says_what_was_measured() -> None:
    profile = build_profile(calibration(), [rank_samples(0), rank_samples(1)])
    hardware = profile.accelerator
    assert (profile.ranks_per_node, profile.nodes, profile.library) == (2, 1, "gloo")
    assert (profile.compute_beside_communication, profile.communication_beside_compute) == (0.75, 0.5)
    assert hardware.memory_bytes_per_s == pytest.approx(3e10)
    assert hardware.transcendental_per_s == pytest.approx(2.5e8)
    assert hardware.optimizer_bytes_per_s == pytest.approx(4e10)
    assert hardware.first_touch_bytes_per_s == pytest.approx(2.5e9)
    cost = collective_cost(profile, "exchange", 2**22, group_shape(profile, range(2)))
    assert cost.seconds == pytest.approx(1e-3 + 2**22 * 1e-9, rel=1e-3)
    assert profile.sources["within"].startswith("measured on a CPU, today, torch 2.13: refshard calibrate")
    assert "other work" not in profile.about
    assert not profile.not_measured
    assert "Not measured" not in text(profile_answer(profile, ""))
    for shown, measured in zip(profile_answer(profile, "").rows, profile.measured):
        assert (shown["collective"], shown["bytes"], shown["seconds"]) == (
            measured.op,
            measured.bytes,
            measured.seconds,
        )


def rates(profile: ClusterSpec) -> list[dict[str, str]]:
    return rows(tables(profile_answer(profile, ""))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_predictions_take_what_is_sustained_and_bursts_are_kept_apart(dtype: Dtype) -> None:
    profile = build_profile(calibration(), [rank_samples(0), rank_samples(1)])
    hardware = profile.accelerator
    for sample in products(dtype=dtype):
        taken = product_seconds(hardware, dtype, sample.flops, sample.bytes)
        assert taken == pytest.approx(sample.seconds, rel=5e-3)
    attention = attention_seconds(hardware, dtype, heads=2, seq_len=128, head_dim=64)
    assert attention == pytest.approx(KERNEL_S + 128**2 * 1e-8)
    for sustained, burst in ((hardware.matmul, hardware.matmul_burst), (hardware.attention, hardware.attention_burst)):
        assert burst[dtype].flops_per_s == pytest.approx(BURST * sustained[dtype].flops_per_s, rel=0.02)
    (row,) = (row for row in rates(profile) if row["TFLOPS"] == f"{dtype} matrix products")
    assert row["sustained / bursts"] == "80%"


def test_a_profile_says_at_which_clocks_and_power_gpus_were() -> None:
    use = GpuUse(gpu=0, samples=4, power_w=698.0, sm_clock_mhz=1395.0, throttled={"power cap": 3})
    watched = rank_samples(0, gpu_use={"bf16 products": (use,)})
    said = build_profile(calibration(), [watched, rank_samples(1)]).accelerator.sources
    assert said["matmul"].endswith("; bf16 at 1395 MHz, 698 W, clocks held down by power cap")
    assert "MHz" not in said["attention_points"]


def test_a_sweep_that_other_work_hit_leaves_no_mark() -> None:
    calm = pieces()
    hit = {name: Piece(samples=faster(piece.samples, 1 / 3)) for name, piece in calm.items()}
    both = [build_profile(calibration(), [rank_samples(0, *s), rank_samples(1)]) for s in ([calm], [calm, hit, calm])]
    assert both[0] == both[1]
    repeats = of_sweeps([calm, hit, calm])["all_gather of 2 ranks on 1 node"].samples[0]
    assert isinstance(repeats, TimedCollective)
    assert len(repeats.seconds) == 9, "those of all sweeps"


def test_a_piece_that_failed_in_one_sweep_is_taken_from_the_others() -> None:
    whole, name = pieces(), "fp32 products"
    failed = {**whole, name: Piece(samples=faster(whole[name].samples[:3], 7.0), failure="OutOfMemoryError: no")}
    assert of_sweeps([failed, whole])[name] == whole[name]
    assert of_sweeps([failed, failed])[name] == failed[name], "what came before it is kept"
    profile = build_profile(calibration(), [rank_samples(0, failed, whole), rank_samples(1)])
    assert not profile.not_measured


WHOLE, NAMES = pieces(), list(pieces_of(calibration(), 1))
GATHER, ALL_TO_ALL = (f"{op} of 2 ranks on 1 node" for op in ("all_gather", "all_to_all"))


def reached(count: int, **failed: Piece) -> Pieces:
    """What a rank has that came as far as the first pieces, some of which ``failed``."""
    return {name: WHOLE[name] for name in NAMES[:count]} | {
        name.replace("_of_", " of "): p for name, p in failed.items()
    }


PARTLY = Piece(samples=WHOLE["fp32 products"].samples[:4], failure="8192 tokens: no room")
NO_KERNEL, NO_ROOM = Piece(failure="RuntimeError: no such kernel"), Piece(failure="4.00 MiB: OutOfMemoryError: no")


@pytest.mark.parametrize(
    ("first", "second", "ended", "missing"),
    [
        (WHOLE, WHOLE | {"fp32 products": PARTLY, "optimizer": NO_KERNEL}, "",
         {"optimizer": NO_KERNEL.failure, "fp32 products": f"only 4 measured; {PARTLY.failure}"}),
        (WHOLE | {"fp32 attention": NO_ROOM}, WHOLE, "",
         {"fp32 attention": NO_ROOM.failure,
          "fp32 products": "left out, since fp32 attention was not measured"}),
        (WHOLE | {ALL_TO_ALL: Piece(failure=ELSEWHERE)}, WHOLE | {ALL_TO_ALL: NO_ROOM}, "",
         {ALL_TO_ALL: NO_ROOM.failure}),
        (reached(NAMES.index(GATHER)), reached(NAMES.index(GATHER)) | {GATHER: NO_KERNEL}, "rank 1 ended",
         {GATHER: NO_KERNEL.failure} | dict.fromkeys(NAMES[NAMES.index(GATHER) + 1 :], "rank 1 ended")),
        (WHOLE, reached(8), "rank 1 was killed", dict.fromkeys(NAMES[8:], "rank 1 was killed")),
    ],
    ids=["some pieces", "one kind of a dtype", "on another rank", "in a collective", "not reached"],
)  # fmt: skip
def test_a_missing_piece_is_named_with_its_reason_and_the_others_make_the_profile(
    first: Pieces, second: Pieces, ended: str, missing: dict[str, str]
) -> None:
    profile = build_profile(calibration(), [rank_samples(0, first), rank_samples(1, second)], ended)
    assert profile.not_measured == missing
    hardware, complete = profile.accelerator, not missing.keys() & {"fp32 attention"} and len(missing) < 10
    assert hardware.matmul.keys() == hardware.attention.keys() == ({"bf16", "fp32"} if complete else {"bf16"})
    assert hardware.matmul["bf16"].flops_per_s == pytest.approx(RATE, rel=2e-3)
    assert (hardware.optimizer_bytes_per_s == 0) is ("optimizer" in missing)
    if GATHER in missing:
        assert (profile.ranks_per_node, profile.nodes) == (1, 1), "no link is known"
        assert profile.sources["within"] == "a placeholder: no all-gather was measured"
    if not ended:  # else many are listed together
        assert all(f"* {name}: {why}" in text(profile_answer(profile, "")) for name, why in missing.items())


def test_a_rank_that_measured_almost_nothing_leaves_no_profile() -> None:
    little = {name: pieces()[name] for name in ("operations", "bf16 products in bursts")}
    with pytest.raises(TooLittleError) as refused:
        build_profile(calibration(), [rank_samples(0), rank_samples(1, little)], "rank 1 was killed")
    assert str(refused.value).startswith(
        "a profile needs elementwise, bf16 products, bf16 attention (elementwise: rank 1 "
    )


def test_bf16_comes_first_and_fp32_attention_last_of_what_computes() -> None:
    names = list(pieces_of(calibration(), 1))
    compute = [name for name in names if "products" in name or "attention" in name]
    assert compute[:4] == ["bf16 products in bursts", "bf16 products", "bf16 attention in bursts", "bf16 attention"]
    assert compute[-2:] == ["fp32 attention", "products beside collectives"]


def test_a_link_that_lets_bursts_pass_has_the_bandwidth_of_what_is_large() -> None:
    """Up to 256 KiB go at 4 GB/s, the rest at 250 MB/s."""
    timed = [
        TimedCollective(
            op="all_gather", ranks=2, nodes=2, bytes=size,
            seconds=(1e-4 + min(size / 2, 2**18) / 4e9 + max(size / 2 - 2**18, 0) / 2.5e8,),
        )
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
    ]  # fmt: skip
    link = fit.fit_link(fit.median_collectives(timed), ranks=2, nodes=2)
    assert link is not None
    assert link.bytes_per_s == pytest.approx(2.5e8, rel=0.01)
    assert link.latency_s == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        (
            {"busy": 0.5},
            "; a rank got its core only 50% of the time (other processes; excluded from compute times only)",
        ),
        ({"machine": "another CPU"}, "; the ranks ran on different machines: a CPU, another CPU"),
    ],
)
def test_a_profile_says_what_makes_its_times_doubtful(changes: dict[str, Any], about: str) -> None:
    assert build_profile(calibration(), [rank_samples(0), rank_samples(1, **changes)]).about.endswith(about)


def test_hosts_with_a_rank_each_have_nothing_within() -> None:
    both = [rank_samples(rank, nodes=2) for rank in range(2)]
    profile = build_profile(calibration(), both)
    assert (profile.ranks_per_node, profile.nodes) == (1, 2)
    assert profile.between == profile.within
    assert profile.sources["within"] == "as between: no two ranks share a host"
    assert profile.of_nodes(8).world_size == 8


def between_nodes(**lost: Piece) -> ClusterSpec:
    """Two nodes of two ranks: 2 us and 10 GB/s within, 30 us and 1 GB/s between, which two groups share."""
    found = pieces(4, 2)
    for shape, hop_s, bytes_per_s in (((4, 2), 2e-5, 1e9), ((2, 1), 2e-6, 1e10), ((2, 2), 3e-5, 5e8)):
        name = collective_piece("all_gather", *shape)
        found[name] = lost.get(
            f"of_{shape[0]}_on_{shape[1]}", Piece(samples=tuple(gathers(*shape, hop_s, bytes_per_s)))
        )
    return build_profile(calibration(ranks=4), [rank_samples(rank, found, nodes=2) for rank in range(4)])


def test_links_within_and_between_nodes_are_told_apart() -> None:
    profile = between_nodes()
    assert (profile.ranks_per_node, profile.nodes) == (2, 2)
    assert profile.between is not None
    assert profile.between.bytes_per_s == pytest.approx(1e9, rel=1e-3), "of a node, its ranks together"
    assert profile.between.latency_s == pytest.approx(3e-5, rel=1e-2), "of one hop, none of them within a node"
    assert profile.within.bytes_per_s == pytest.approx(1e10, rel=1e-3)
    assert profile.within.latency_s == pytest.approx(2e-6, rel=5e-2)
    kept = {(m.ranks, m.nodes): 0 for m in profile.measured}
    assert kept.keys() == {(4, 2), (2, 1), (2, 2)}
    sizes = [m.bytes for m in profile.measured if (m.op, m.ranks, m.nodes) == ("all_gather", 2, 2)]
    assert sizes == [2**10, 2**16, 2**22, 2**26]


def test_the_link_between_nodes_is_known_from_one_rank_a_node_too() -> None:
    profile = between_nodes(of_4_on_2=Piece(failure="no"))
    assert profile.between is not None
    assert profile.between.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    alone = between_nodes(of_4_on_2=Piece(failure="no"), of_2_on_2=Piece(failure="no"))
    assert (alone.nodes, alone.ranks_per_node, alone.between) == (1, 2, None)
    unknown = between_nodes(of_2_on_1=Piece(failure="no"))
    assert unknown.within == unknown.between
    assert unknown.sources["within"] == "as between: all-gathers within a node were not measured"


def test_a_single_rank_measures_no_collective() -> None:
    profile = build_profile(calibration(ranks=1), [rank_samples(0, pieces(1))])
    assert not profile.measured
    assert collective_cost(profile, "all_reduce", 2**30, group_shape(profile, [0])).seconds == 0
    assert "fp32 matrix products" in [row["TFLOPS"] for row in rates(profile)]


class Scripted(StandIn):
    """Starts nothing, and leaves what ranks would have left."""

    def __init__(self, launch: LaunchOutcome | LaunchError, left: Sequence[RankSamples]) -> None:
        def ranks(program: Program, folder: Path) -> LaunchOutcome:
            asked = msgspec.json.decode(request_file(folder, "calibration").read_bytes(), type=Calibration)
            assert (program.name, program.processes) == ("calibration", asked.ranks)
            for samples in left:
                samples_file(folder, samples.rank).write_bytes(msgspec.json.encode(samples))
            if isinstance(launch, LaunchError):
                raise launch
            return launch

        super().__init__(ranks)


def profile_of(folder: Path, launch: LaunchOutcome | LaunchError, left: Sequence[RankSamples]) -> ClusterSpec:
    ended = measure(calibration(), Scripted(launch, left), folder, print)
    return read_profile(folder, ended)


def test_the_driver_builds_a_profile_of_what_ranks_left(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, LaunchOutcome(), [rank_samples(0), rank_samples(1)])
    assert profile.measured
    assert read_profile(tmp_path) == profile, "as often as one likes"


BF16_ONLY = reached(8)
KILLED = LaunchOutcome(failed_rank=1, error="rank 1 ended with exit status 1", log_tail=("Traceback", "ValueError: no"))


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (
            LaunchOutcome(timed_out=True, error="rank 0 in f"),
            "the ranks did not finish within 2400 s and were killed (rank 0 in f)",
        ),
        (KILLED, "rank 1 ended with exit status 1 (ValueError: no)"),
        (LaunchError("rank 1 of torchrun is gone"), "rank 1 of torchrun is gone"),
    ],
)
def test_a_launch_that_failed_leaves_what_was_measured(
    tmp_path: Path, launch: LaunchOutcome | LaunchError, reason: str
) -> None:
    profile = profile_of(tmp_path, launch, [rank_samples(0, BF16_ONLY), rank_samples(1)])
    assert profile.accelerator.matmul.keys() == {"bf16"}
    assert set(profile.not_measured.values()) == {reason}


@pytest.mark.parametrize(
    ("launch", "left", "message"),
    [
        (
            KILLED,
            [rank_samples(0)],
            "calibrate: rank 1 ended with exit status 1 (ValueError: no); rank 1 measured nothing; correct that",
        ),
        (LaunchOutcome(), [], "calibrate: it ended early; ranks 0, 1 measured nothing; correct that"),
        (
            KILLED,
            [rank_samples(0, {}), rank_samples(1)],
            "calibrate: rank 1 ended with exit status 1 (ValueError: no); a profile needs operations, elementwise, ",
        ),
    ],
)
def test_too_little_for_a_profile_is_told_in_a_line(
    tmp_path: Path, launch: LaunchOutcome, left: Sequence[RankSamples], message: str
) -> None:
    with pytest.raises(LaunchError) as failed:
        profile_of(tmp_path, launch, left)
    assert str(failed.value).startswith(message)


def test_a_folder_without_a_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^from: .* has no calibration \(.*\); name a NAME\.toml\.samples folder$"):
        read_profile(tmp_path)


TWO = NetworkSpec(hosts=2, rate="2gbit")
PLACE = Place(rank=0, local_rank=0, world_size=6, local_world_size=2, address="127.0.0.1")


def plan(**changes: Any) -> Calibration:
    asked: dict[str, Any] = {"ranks": None, "threads": 1, "network": None, "device": "cpu", "quick": True}
    return plan_calibration(**{**asked, **changes})


def test_what_is_measured_by_default() -> None:
    cores = available_cores()
    thorough = plan(quick=False)
    assert (thorough.ranks, thorough.sweeps, thorough.device, thorough.cpu_clock) == (cores, 3, "cpu", True)
    assert thorough.pace.most_s > plan().pace.most_s
    assert plan(ranks=4 * cores).cpu_clock is False
    over = plan(network=TWO, device="auto")
    assert (over.ranks, over.nodes_here) == (2 * max(cores // 2, 1), 2)
    assert plan(place=PLACE).ranks == 6, "all that torchrun started"
    elsewhere = plan(elsewhere=True, ranks=16, device="cuda")
    assert (elsewhere.ranks, elsewhere.device) == (16, "cuda"), "whatever this machine has"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 0}, "threads_per_rank must be >= 1, got 0"),
        ({"ranks": 0}, "ranks must be >= 1, got 0"),
        ({"sweeps": 0}, "rounds must be from 1 to 99, got 0"),
        ({"ranks": 3, "network": TWO}, "ranks must be a multiple of the network's 2 hosts, got 3"),
        ({"device": "cuda", "network": TWO}, "device"),
        ({"ranks": 7, "place": PLACE}, "ranks: 7 asked for, torchrun started 6; lower it, or start more"),
        ({"elsewhere": True, "device": "cuda"}, "launcher 'slurm' starts ranks on nodes that are unknown here; give"),
        ({"elsewhere": True, "ranks": 2, "device": "auto"}, "launcher 'slurm' starts ranks on nodes that are unknown"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        plan(**changes)
    assert message in str(refused.value)


class Warming(Stopwatch):
    """A device on which a call takes 1 ms at first, and longer the longer it works, up to 1.3 ms after 50 ms."""

    def __init__(self, **pace: float) -> None:
        fields = {"rest_s": 0.0, "burst_s": 0.005, "window_s": 0.01, "most_s": 1.0}
        super().__init__(Pace(**{**fields, **pace}))
        self.worked_s = 0.0

    def _together(self, call_s: float) -> int:
        return 1

    def _batch(self, call: Call, first: int, count: int) -> float:
        taken = count * 1e-3 * (1 + 0.3 * min(self.worked_s / 0.05, 1.0))
        self.worked_s += taken
        return taken


def test_a_burst_finds_high_clocks_and_a_sustained_measurement_those_that_stay() -> None:
    watch = Warming()
    assert watch.burst(lambda _: None) < 1.05e-3
    assert watch.sustained(lambda _: None) == pytest.approx(1.3e-3, rel=1e-3)
    assert 0.07 < watch.worked_s < 0.12, "three windows more than it takes to settle"


def test_a_sustained_measurement_ends_when_its_time_is_over() -> None:
    watch = Warming(most_s=0.02)
    assert 1e-3 < watch.sustained(lambda _: None) < 1.2e-3
    assert watch.worked_s < 0.04


def test_clocks_have_settled_when_three_windows_agree() -> None:
    assert not settled([1.0, 1.0])
    assert settled([1.2, 1.0, 1.005, 1.009])
    assert not settled([1.0, 1.005, 1.011])


def test_ranks_agree_that_one_of_them_failed() -> None:
    store = HashStore()

    def fail() -> str:
        raise MemoryError("no room")

    def rank(number: int) -> list[str]:
        agreement, found = Agreement(store, 2), list[str]()
        for failing in (None, 1, None):
            try:
                found.append(agreement.made_by_all("1.00 KiB", fail if failing == number else lambda: "made"))
            except FailedOnSomeRankError as error:
                found.append(str(error))
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == ["made", ELSEWHERE, "made"]
    assert second == ["made", "1.00 KiB: MemoryError: no room", "made"]


def test_a_stopwatch_times_calls_on_other_operands_each_time() -> None:
    seen: list[int] = []
    watch = CpuStopwatch(Pace(rest_s=0.0, burst_s=0.0, window_s=1e-3, most_s=1e-2), cpu_clock=True)
    for timing in (watch.burst, watch.sustained):
        seen.clear()
        assert 0 < timing(lambda index: seen.append(index) or math.factorial(2000)) < 0.1  # type: ignore[func-returns-value]
        assert seen == list(range(len(seen))), "each call has a number of its own"
    assert 0 < watch.busy <= 1


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_whatever_the_ranks_share_is_shared_evenly(ranks: int) -> None:
    for device in ("cpu", "cuda"):
        for size in (*traffic(device, quick=False).sizes, *traffic(device, quick=True).sizes):
            numel = divisible(size // 4, ranks)
            assert numel % ranks == 0
            assert numel >= ranks
    assert max(traffic("cuda", quick=False).sizes) == 2**30, "as large as a gathered layer"


def test_shapes_are_those_that_training_meets() -> None:
    for device in ("cpu", "cuda"):
        quick, thorough = (kernels.shapes(device, quick=q) for q in (True, False))
        assert len(quick.products) < len(thorough.products)
        assert all(min(shape) >= 64 for shape in thorough.products)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "2gbit"}, "network must be HOSTSxRATE, such as 2x2gbit, got '2gbit'"),
        ({"network": "2x2gb"}, "network: rate must be a whole number from 1 to 9999 and 'mbit' or 'gbit'"),
        ({"network": "2x2gbit", "launcher": "slurm"}, "network: --network brings its own launcher; leave out"),
        ({"launcher": "slrum"}, "launcher: unknown 'slrum'; did you mean 'slurm'?"),
        ({"sbatch": "-p main"}, "sbatch needs launcher 'slurm', got launcher 'local'; add --launcher slurm"),
        ({"launcher": "slurm"}, "launcher 'slurm' starts ranks on nodes that are unknown here; give --gpus, and"),
        ({"launcher": "torchrun"}, "launcher 'torchrun' needs torchrun, which did not start this process; run"),
        ({"output": Path("/proc/no/such.toml")}, "out: /proc/no/such.toml cannot be written"),
        ({"output": Path("/tmp")}, "out: /tmp is a folder; name the file to write"),
        ({"output": Path()}, "out: . is a folder; name the file to write"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(changes: dict[str, Any], message: str) -> None:
    changes = dict(changes)
    output = changes.pop("output", None)
    with pytest.raises(SpecError) as refused:
        command.calibrate(output, command.Options(**{"device": "cpu", "quick": True, **changes}))
    assert str(refused.value).startswith(message)


def left(folder: Path) -> Path:
    """A folder that a calibration left when it was cut short after bf16."""
    folder.mkdir()
    request_file(folder, "calibration").write_bytes(msgspec.json.encode(calibration()))
    for rank in range(2):
        samples_file(folder, rank).write_bytes(msgspec.json.encode(rank_samples(rank, BF16_ONLY)))
    return folder


def test_samples_that_were_left_become_a_profile(tmp_path: Path) -> None:
    folder = left(tmp_path / "mine.toml.samples")
    assert text(command.from_samples(folder, None)).endswith(f"profile: {tmp_path / 'mine.toml'}")
    made = command.from_samples(folder, tmp_path / "other.toml")
    assert made.status == 0
    assert load_cluster(str(tmp_path / "other.toml")).accelerator.matmul.keys() == {"bf16"}
    assert (tmp_path / "mine.toml").read_text() == (tmp_path / "other.toml").read_text()
    (missing,) = notes(made)
    assert "all_gather of 2 ranks on 1 node" in missing
    assert missing.endswith(": the calibration ended before")
    assert as_json(made)["profile"]["hardware"]["matmul"].keys() == {"bf16"}
    with pytest.raises(SpecError, match=r"out: must be given unless the folder is NAME\.toml\.samples, got .*; add"):
        command.from_samples(folder.rename(tmp_path / "moved"), None)


def test_samples_that_were_left_are_not_overwritten(tmp_path: Path) -> None:
    left(tmp_path / "mine.toml.samples")
    with pytest.raises(SpecError, match=r"mine\.toml\.samples holds samples of an earlier calibration; make a profile"):
        command.calibrate(tmp_path / "mine.toml", command.Options(device="cpu", ranks=2))


def test_a_device_is_one_of_three() -> None:
    assert command.device("cpu") == "cpu"
    with pytest.raises(SpecError, match="device must be one of auto, cpu, cuda, got 'tpu'"):
        command.device("tpu")


@pytest.mark.parametrize("printing", [["--json"], ["-v"], ["--csv"], ["--markdown"]])
def test_options_of_the_output_go_with_samples_that_were_left(tmp_path: Path, printing: list[str]) -> None:
    folder = left(tmp_path / "mine.toml.samples")
    done = CliRunner().invoke(app, ["calibrate", "--from", str(folder), *printing])
    assert (done.exit_code, (tmp_path / "mine.toml").exists()) == (0, True), done.output


def test_nothing_is_measured_beside_samples_that_were_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["calibrate", "--from", "runs/a", "--quick", "--json"], capsys) == (
        2,
        "refshard: from: nothing is measured; leave out --quick\n",
    )
