"""Dry-run cases from suite to records: each is the strategy's own code on a GPU that is not there."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step
from refshard.dryrun.request import Pool
from refshard.errors import SpecError
from refshard.measure.dry.rank import DryCase, DryResult, StepResult, rank_folder, ranks_of, result_file
from refshard.measure.dry.record import NOT_CLAIMED, launch_dry, prove_dry, record_dry
from refshard.measure.launchers.base import LaunchOutcome, Program
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.rank import trace_file
from refshard.measure.run import blank_record, check_suite, run_suite
from refshard.measure.worker import request_file
from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.quantities import GIB, MIB, format_bytes
from refshard.records import DERIVED, METRICS, Census, CollectiveCount, LaunchRecord, RunRecord, StepTrace
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.suite import SuiteSpec
from refshard.specs.writing import to_toml
from tests.fakecuda.needs import needs_device
from tests.measure.fakes import ENVIRONMENT, Silent, StandIn, make_suite

DRY: dict[str, Any] = {
    "fidelity": "dryrun", "cluster": "dgx-h100x32", "model": "llama-tiny", "seq_len": 64, "batch_per_rank": 1,
}  # fmt: skip
TABLES: list[dict[str, Any]] = [
    {"strategy": "ddp", "gpus": 8},
    {"strategy": "fsdp1", "gpus": 8, "checkpointing": "full", "precision": "bf16"},
    {"strategy": "fsdp2", "gpus": 16, "dp_replicate": 2, "checkpointing": "selective", "microbatches": 2,
     "batch_per_rank": 2, "precision": "bf16"},
    {"strategy": "refshard-yafsdp", "gpus": 16, "tp": 2},
    {"strategy": "pipeline", "gpus": 2, "microbatches": 2, "global_batch": 4},
    {"strategy": "fsdp2-compiled", "gpus": 8},
]  # fmt: skip
MUON: list[dict[str, Any]] = [
    {"strategy": "fsdp2-tuned", "gpus": 4, "optimizer": "muon"},
    {"strategy": "refshard-fsdp", "gpus": 4, "optimizer": "muon", "precision": "bf16"},
]  # fmt: skip
HEADER = RunRecord(
    run_id="r", refshard="0", started_at="", suite=make_suite(), environment=ENVIRONMENT, planned=1
)  # fmt: skip


def dry_suite(tables: list[dict[str, Any]], **shared: Any) -> SuiteSpec:
    return make_suite(matrix=tables, case={**DRY, **shared})


def run(folder: Path, suite: SuiteSpec) -> dict[str, LaunchRecord]:
    return {
        record.case.job.strategy: record
        for record in run_suite(suite, folder, LocalLauncher(), Silent(), ENVIRONMENT).launches
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dry") / "run"


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, LaunchRecord]:
    """A record by strategy."""
    return run(folder, dry_suite(TABLES))


@pytest.mark.processes
@needs_device
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestRun:
    """Real processes on the fake device."""

    def test_a_strategy_runs_unchanged_and_issues_what_it_announces(self, ran: dict[str, LaunchRecord]) -> None:
        assert len(ran) == len(TABLES)
        for record in ran.values():
            assert (record.state, record.error) == ("ok", None)
            assert record.proof is not None
            assert record.proof.traced == record.proof.announced != ()
            assert (record.proof.failures, record.proof.loss_parity) == ((), None)
            assert record.proof.parity_note == record.proof.bits_note == NOT_CLAIMED

    def test_collectives_are_those_of_hybrid_sharding_with_two_microbatches(self, ran: dict[str, LaunchRecord]) -> None:
        proof = ran["fsdp2"].proof
        assert proof is not None
        counts = {count.op: count.count for count in proof.traced}
        assert counts == {"all_gather": 2 * 13, "reduce_scatter": 2 * 7, "all_reduce": 2 * 7}
        assert proof.wrapped_units[-1] == "model.layers.5"

    @pytest.mark.full
    def test_muons_owners_exchange_matrices_and_one_rank_does_not_tell_of_all(self, tmp_path: Path) -> None:
        ran = run(tmp_path / "run", dry_suite(MUON))
        for record in ran.values():
            assert record.proof is not None
            assert record.proof.traced == record.proof.announced != ()
        record = ran["refshard-fsdp"]
        assert record.proof is not None
        counts = {count.op: count.count for count in record.proof.traced}
        assert (counts["all_to_all"], counts["all_reduce"]) == (3 * 6, 1)
        (warning,) = (words for words in record.warnings if "Muon" in words)
        assert warning.startswith("refshard: Muon's work on rank 0 is 98 % of what the ranks wait for")
        assert not any("Muon" in words for words in ran["fsdp2-tuned"].warnings)

    def test_a_record_says_what_any_does(self, ran: dict[str, LaunchRecord]) -> None:
        record = ran["fsdp1"]
        assert (record.fidelity, record.device, record.backend) == ("dryrun", "NVIDIA H100 80GB HBM3", "nccl")
        assert record.metrics.keys() == METRICS.keys() - DERIVED
        ((step_s,),) = record.step_times_s
        metrics = {name: value or 0.0 for name, value in record.metrics.items()}
        assert metrics["step_time_s"] == step_s > 0
        assert metrics["tokens_per_s_gpu"] == pytest.approx(64 / step_s)
        assert metrics["mfu"] == pytest.approx(metrics["tflops"] * 1e12 / 989e12)
        assert metrics["compute_s"] + metrics["exposed_comm_s"] + metrics["idle_s"] == pytest.approx(step_s)
        assert (record.losses, record.metrics["loss_parity"], record.metrics["rss_bytes"]) == ((), None, None)
        assert record.recompute == "forward of 6 of 6 layers, not counted"

    def test_memory_is_that_of_the_caching_allocator(self, ran: dict[str, LaunchRecord]) -> None:
        for record in (ran["ddp"], ran["fsdp1"], ran["fsdp2"], ran["refshard-yafsdp"]):
            peak, active, reserved = (
                record.metrics[f"peak_{name}_bytes"] or 0 for name in ("memory", "active", "reserved")
            )
            assert peak <= active <= reserved
            assert reserved % (2 * MIB) == 0
            # The last step is like the one before it, and the first has no optimizer state in backward. DDP holds its
            # first bucket in the second step.
            assert max(record.memory_course_bytes) == peak or record is ran["ddp"]
        assert max(ran["ddp"].memory_course_bytes) < (ran["ddp"].metrics["peak_memory_bytes"] or 0)
        whole = 4 * 4_951_296  # parameters in fp32
        unsharded, sharded = (ran[name].metrics["peak_memory_bytes"] or 0 for name in ("ddp", "fsdp1"))
        assert unsharded > 4 * whole
        assert unsharded - sharded > 3 * whole  # seven eighths of four copies, less a unit that is gathered

    def test_the_census_counts_what_a_step_asks_of_the_device(self, ran: dict[str, LaunchRecord]) -> None:
        census = ran["ddp"].census
        assert census is not None
        assert census.operators > 6 * 7 * 3  # products of seven linear layers a block, forward and backward
        assert 0 < census.allocations < census.operators
        assert ran["ddp"].host_waits == {}
        assert (ran["fsdp1"].host_waits or {}).keys() == {"event"}  # it limits its own all-gathers

    def test_the_trace_shows_the_same_collectives(self, ran: dict[str, LaunchRecord], folder: Path) -> None:
        for name in ("fsdp2", "refshard-yafsdp"):
            (trace,) = ran[name].traces
            timeline = read_timeline(folder / trace)
            (issued,) = collectives_per_step(timeline).values()
            proof = ran[name].proof
            assert proof is not None
            assert issued == tuple((count.op, count.count, count.bytes) for count in proof.traced)

    def test_the_stages_of_a_pipeline_are_replayed_together(self, ran: dict[str, LaunchRecord]) -> None:
        record = ran["pipeline"]
        assert len(record.step_times_s) == len(record.steps) == len(record.traces) == 2
        first, last = (step.compute_ns for step in record.steps)
        assert first != last  # one has the embedding, the other the head
        # Two microbatches through two stages: a stage stands still for a third of a step, or nearly so.
        for step in record.steps:
            assert step.span_ns - step.compute_ns > 0.2 * step.span_ns

    @pytest.mark.full
    def test_too_small_a_gpu_is_told_with_what_the_case_needs(self, tmp_path: Path) -> None:
        cluster = tmp_path / "small.toml"
        cluster.write_text(small_cluster(60 * MIB))
        (record,) = run(tmp_path / "run", dry_suite([{"strategy": "ddp", "gpus": 8}], cluster=str(cluster))).values()
        assert record.state == "oom"
        needs = record.metrics["peak_memory_bytes"] or 0
        assert needs > 4 * 4 * 4_951_296
        assert f"out of memory: needs at least {format_bytes(needs)} (" in str(record.error)
        assert ", 60.0 MiB usable; " in str(record.error)
        assert record.metrics["step_time_s"] is None
        assert record.proof is None


KNOBS: dict[str, Any] = {
    "model": "llama3-8b-cut3", "seq_len": 512, "gpus": 64, "precision": "bf16",
}  # fmt: skip
"""Blocks of 436 MB in bf16 over the network between nodes: communication decides how long a step takes."""
BLOCK = 218_112_000
"""Parameters of a block."""


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LaunchRecord]:
    """FSDP2 with each knob, by strategy; with other memory, by that."""
    names = ["fsdp2", "fsdp2-prefetch2", "fsdp2-reduce-group", "fsdp2-reduce-buffers2"]
    tables: list[dict[str, Any]] = [
        {"strategy": names},
        {"strategy": "fsdp2", "comm_memory": ["allocator", "group", "symmetric"]},
    ]
    folder = tmp_path_factory.mktemp("turned") / "run"
    records = run_suite(dry_suite(tables, **KNOBS), folder, LocalLauncher(), Silent(), ENVIRONMENT).launches
    return {r.case.job.comm_memory if r.case.job.comm_memory != "default" else r.case.job.strategy: r for r in records}


@pytest.mark.full
@needs_device
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestKnobs:
    """A dry run follows FSDP2's knobs, and says of which it cannot."""

    def test_none_changes_what_is_communicated(self, turned: dict[str, LaunchRecord]) -> None:
        ran = [record for record in turned.values() if record.case.job.comm_memory in ("default", "allocator")]
        assert len(ran) == 5
        for record in ran:
            assert (record.state, record.error) == ("ok", None)
            assert record.proof is not None
            assert record.proof.traced == record.proof.announced
            assert {count.op: count.count for count in record.proof.traced} == {"all_gather": 7, "reduce_scatter": 4}

    def test_gathers_start_earlier_and_compute_waits_less_for_reductions(self, turned: dict[str, LaunchRecord]) -> None:
        plain, ahead = (turned[name].steps[0].exposed_ns for name in ("fsdp2", "fsdp2-prefetch2"))
        assert ahead < plain
        assert step_s_of(turned["fsdp2-reduce-buffers2"]) < step_s_of(turned["fsdp2"])

    def test_a_gather_need_not_wait_for_a_reduction_in_another_group(self, turned: dict[str, LaunchRecord]) -> None:
        shared, separate = (turned[name].steps[0] for name in ("fsdp2", "fsdp2-reduce-group"))
        assert separate.exposed_ns < shared.exposed_ns
        assert step_s_of(turned["fsdp2-reduce-group"]) < step_s_of(turned["fsdp2"])
        peaks = {turned[name].metrics["peak_memory_bytes"] for name in ("fsdp2", "fsdp2-reduce-group")}
        assert len(peaks) == 1

    def test_what_is_in_flight_takes_memory(self, turned: dict[str, LaunchRecord]) -> None:
        plain, gathers, reductions = (
            turned[name].metrics["peak_memory_bytes"] or 0
            for name in ("fsdp2", "fsdp2-prefetch2", "fsdp2-reduce-buffers2")
        )
        assert plain < gathers <= plain + 2 * 2 * BLOCK
        assert plain < reductions <= plain + 4 * BLOCK

    def test_memory_that_is_not_modelled_is_unsupported(self, turned: dict[str, LaunchRecord]) -> None:
        group, symmetric = turned["group"], turned["symmetric"]
        assert group.state == symmetric.state == "unsupported"
        assert str(group.error).startswith("comm_memory 'group' is not dry-run: NCCL allocates it, in a pool that")
        assert str(symmetric.error).startswith("comm_memory 'symmetric' is not dry-run: its copy engines leave")
        assert step_s_of(turned["allocator"]) == step_s_of(turned["fsdp2"])


def step_s_of(record: LaunchRecord) -> float:
    ((step_s,),) = record.step_times_s
    return step_s


def small_cluster(usable_bytes: int) -> str:
    cluster = load_cluster("dgx-h100")
    beside = context(cluster.accelerator).bytes + COMMUNICATOR_BYTES[0]
    hardware = msgspec.structs.replace(cluster.accelerator, memory_bytes=usable_bytes + beside)
    return to_toml(msgspec.structs.replace(cluster, hardware=hardware))


CASE = Case.of(strategy="fsdp2", gpus=8, global_batch=8, **{k: v for k, v in DRY.items() if k != "batch_per_rank"})
GATHERS = CollectiveCount(op="all_gather", count=13, bytes=1000)
REDUCES = CollectiveCount(op="reduce_scatter", count=7, bytes=700)
STEP = StepResult(
    step_s=0.1,
    trace=StepTrace(
        rank=0, step=3, span_ns=10**8, compute_ns=7 * 10**7, comm_ns=4 * 10**7, exposed_ns=10**7, idle_ns=2 * 10**7
    ),
    issued=(GATHERS, REDUCES),
    census=Census(operators=10, allocations=4, allocated_bytes=640, order_sha256="0" * 64),
    memory_course_bytes=(1, 2),
    host_waits={},
)
BLOCKS = tuple(f"model.layers.{index}" for index in range(6))
GOOD = DryResult(
    state="ok", usable_bytes=8 * GIB, peak=Pool(allocated=3 * GIB, active=4 * GIB, reserved=5 * GIB, requested=GIB),
    blocks=BLOCKS, wrapped_units=("root", *BLOCKS), announced=(GATHERS, REDUCES), stepped=13, trained=100,
    steps=(STEP,),
)  # fmt: skip
OUT = DryResult(
    state="oom", usable_bytes=2 * GIB, peak=Pool(allocated=GIB, active=GIB, reserved=GIB, requested=GIB),
    refused="1.96 GiB",
)  # fmt: skip


class Leaves(StandIn):
    """Leaves what ``answer`` says for each rank up to one that is not ok, and ends as ``launch`` says."""

    def __init__(self, answer: Callable[[DryCase], DryResult | None], launch: LaunchOutcome | None = None) -> None:
        super().__init__(self._leave, "build")
        self.asked: list[DryCase] = []
        self._answer, self._launch = answer, launch or LaunchOutcome()

    def _leave(self, program: Program, folder: Path) -> LaunchOutcome:
        assert (program.name, program.processes) == ("dryrun", 1)
        asked = msgspec.json.decode(request_file(folder, "dryrun").read_bytes(), type=DryCase)
        for rank in ranks_of(asked.case):
            self.asked.append(msgspec.structs.replace(asked, rank=rank))
            if (result := self._answer(self.asked[-1])) is None:
                break
            path = result_file(rank_folder(folder, rank))
            path.parent.mkdir()
            path.write_bytes(msgspec.json.encode(result))
            if result.state != "ok":
                break
        return self._launch


def record_of(launcher: Leaves, folder: Path, case: Case = CASE) -> LaunchRecord:
    launched = launch_dry(case, launcher, folder, lambda _: None)
    return record_dry(blank_record(case, 0, HEADER, datetime.now(UTC)), launched)


def test_what_a_rank_leaves_becomes_the_record(tmp_path: Path) -> None:
    record = record_of(Leaves(lambda _: GOOD), tmp_path)
    assert (record.state, record.error) == ("ok", None)
    assert record.metrics["overlap_ratio"] == pytest.approx(0.75)
    assert record.metrics["tokens_per_s_gpu"] == pytest.approx(640)
    assert [record.metrics[f"peak_{name}_bytes"] for name in ("memory", "active", "reserved")] == [
        3 * GIB, 4 * GIB, 5 * GIB,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"announced": (GATHERS,)}, "the plan announced 13 all_gather of 1000 B, the recording shows 13 all_gather"),
        ({"steps": (msgspec.structs.replace(STEP, issued=(REDUCES,)),)}, "the recording shows 7 reduce_scatter of"),
        ({"stepped": 12}, "the optimizers of all ranks together update 96 of 100 trained elements"),
        ({"wrapped_units": ()}, "the model was not wrapped: it has no unit"),
        ({"wrapped_units": BLOCKS[1:]}, "blocks outside any unit: model.layers.0"),
        (
            {"announced": (), "steps": (msgspec.structs.replace(STEP, issued=()),)},
            "no collective was announced, but training on several ranks needs them",
        ),
    ],
)  # fmt: skip
def test_what_is_not_as_announced_fails_the_case(changes: dict[str, Any], failure: str, tmp_path: Path) -> None:
    result = msgspec.structs.replace(GOOD, **changes)
    assert any(failure in told for told in prove_dry(CASE, [result]).failures)
    record = record_of(Leaves(lambda _: result), tmp_path)
    assert (record.state, record.metrics) == ("failed", {})
    assert str(record.error).startswith("proof of run: ")


def test_a_rank_that_holds_more_padding_steps_all_that_it_holds() -> None:
    assert not prove_dry(CASE, [msgspec.structs.replace(GOOD, stepped=12, held=12)]).failures
    assert prove_dry(CASE, [msgspec.structs.replace(GOOD, stepped=11, held=12)]).failures


WITHIN = DryResult(state="oom", peak=msgspec.structs.replace(GOOD.peak, allocated=GIB // 2), refused="1.70 GiB")
REPLAYED = msgspec.structs.replace(GOOD, limited=WITHIN)
"""Memory that comes free earlier may also leave less room than the run met, if it is in pieces."""
NEEDS = "out of memory: needs at least 3.00 GiB (5.00 GiB reserved), "
PEAKS = {"peak_memory_bytes": 3 * GIB, "peak_active_bytes": 4 * GIB, "peak_reserved_bytes": 5 * GIB}


@pytest.mark.parametrize(
    ("limited", "unlimited", "error", "peaks"),
    [
        (OUT, GOOD, f"{NEEDS}2.00 GiB usable; 1.00 GiB were in use when it asked for 1.96 GiB", PEAKS),
        (OUT, REPLAYED, f"{NEEDS}2.00 GiB usable; 512 MiB were in use when it asked for 1.70 GiB", PEAKS),
        (REPLAYED, None, f"{NEEDS}8.00 GiB usable; 512 MiB were in use when it asked for 1.70 GiB", PEAKS),
        (OUT, DryResult(state="failed", error="no"),
         "out of memory: 1.00 GiB were in use when it asked for 1.96 GiB (2.00 GiB usable)", {}),
    ],
)  # fmt: skip
def test_out_of_memory_is_run_again_without_a_limit_to_learn_what_is_needed(
    limited: DryResult, unlimited: DryResult | None, error: str, peaks: dict[str, int], tmp_path: Path
) -> None:
    launcher = Leaves(lambda asked: limited if asked.limited else unlimited)
    record = record_of(launcher, tmp_path)
    assert [asked.limited for asked in launcher.asked] == [True] + [False] * (unlimited is not None)
    assert (record.state, record.error) == ("oom", error)
    assert {name: value for name, value in record.metrics.items() if value is not None} == peaks
    assert not peaks or record.metrics.keys() == METRICS.keys() - DERIVED


def test_what_fits_by_the_replay_counts_as_it_does_without_a_limit(tmp_path: Path) -> None:
    """``record_stream()`` held memory back for too long; the traces are those of the second run."""
    peak = msgspec.structs.replace(GOOD.peak, reserved=2 * GIB)
    fits = msgspec.structs.replace(GOOD, fits=True, steps=(msgspec.structs.replace(STEP, peak=peak),))

    def answer(asked: DryCase) -> DryResult:
        if not asked.limited:
            trace_file(tmp_path / "unlimited", asked.rank).write_text("trace")
        return OUT if asked.limited else fits

    record = record_of(Leaves(answer), tmp_path)
    assert (record.state, record.error) == ("ok", None)
    assert record.metrics["peak_reserved_bytes"] == 2 * GIB
    assert trace_file(tmp_path, 0).read_text() == "trace"


@pytest.mark.parametrize(
    ("launch", "result", "state", "error"),
    [
        ({}, None, "failed", "the process ended without a result"),
        ({"failed_rank": 0, "error": "rank 0 ended with signal 11"}, None, "failed", "rank 0 ended with signal 11"),
        ({"timed_out": True}, None, "timeout", "did not finish within time_limit_s = 600; the ranks were killed"),
        ({}, DryResult(state="failed", error="no meta kernel"), "failed", "no meta kernel"),
        ({}, DryResult(state="unsupported", error="no"), "unsupported", "no"),
    ],
)
def test_a_process_that_does_not_end_well_is_the_case_s_end(
    launch: dict[str, Any], result: DryResult | None, state: str, error: str, tmp_path: Path
) -> None:
    record = record_of(Leaves(lambda _: result, LaunchOutcome(**launch)), tmp_path)
    assert (record.state, record.error) == (state, error)


def test_the_slowest_of_ranks_that_differ_counts(tmp_path: Path) -> None:
    case = CASE.changed(strategy="pipeline", gpus=2, global_batch=2)
    slow = msgspec.structs.replace(STEP, step_s=0.4)

    def answer(asked: DryCase) -> DryResult:
        reserved = msgspec.structs.replace(GOOD.peak, reserved=(6 - asked.rank) * GIB)
        return msgspec.structs.replace(GOOD, trained=26, peak=reserved, steps=(STEP, slow) if asked.rank else ())

    launcher = Leaves(answer)
    record = record_of(launcher, tmp_path, case)
    assert [asked.rank for asked in launcher.asked] == [0, 1]
    assert record.step_times_s == ((0.1,), (0.4,))
    assert (record.metrics["step_time_s"], record.metrics["peak_reserved_bytes"]) == (0.4, 6 * GIB)


def test_a_rank_that_ends_badly_is_the_last(tmp_path: Path) -> None:
    case = CASE.changed(strategy="pipeline", gpus=2, global_batch=2)
    launcher = Leaves(lambda _: DryResult(state="failed", error="no"))
    assert record_of(launcher, tmp_path, case).state == "failed"
    assert [asked.rank for asked in launcher.asked] == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": "no-such"}, "cluster: no profile and no file 'no-such'"),
        ({"cluster": "lab-2x2gbit"}, "cluster must have CUDA GPUs for dryrun cases, but 'lab-2x2gbit' has none"),
        ({"gpus": 12}, "on nodes of 8 ranks, got 12"),
    ],
)
def test_a_cluster_that_cannot_hold_the_case_is_refused_before_anything_runs(
    changes: dict[str, Any], message: str
) -> None:
    suite = make_suite(matrix={"strategy": ["fsdp2"]}, case={**DRY, "gpus": 8, **changes})
    with pytest.raises(SpecError, match=message):
        check_suite(suite, LocalLauncher(), oversubscribe=False)


@pytest.mark.processes
@needs_device
def test_a_world_of_any_size_needs_no_cores() -> None:
    suite = dry_suite([{"strategy": "fsdp2", "gpus": 256}])
    (case,) = check_suite(suite, Leaves(lambda _: None), oversubscribe=False)
    assert (case.processes, case.job.gpus) == (1, 256)
