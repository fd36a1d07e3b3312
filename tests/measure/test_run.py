"""Suite to records, with a launcher that starts nothing."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.errors import LaunchError, SpecError, StoreError
from refshard.flops import flops_per_token
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.load import RankLoad
from refshard.measure.rank import rank_file, trace_file
from refshard.measure.run import check_suite, mark_latest, resume_run, round_order, run_suite
from refshard.measure.store import RECORDS, read_run
from refshard.records import DERIVED, METRICS, CollectiveCount, GpuMemory, GpuUse, LaunchRecord, Load, Proof, Run
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.specs.suite import SuiteSpec
from tests.analysis.handmade import event, shaped, step, write
from tests.measure.fakes import ANNOUNCED, ENVIRONMENT, FakeLauncher, Silent, good, leaving, make_suite, write_rank

H200_DDP = Path(__file__).parents[1] / "analysis/h200/ddp.json.gz"
AXES = {"strategy": ["single", "ddp", "refshard-fsdp"], "gpus": [2], "model": ["llama-tiny"]}
_NONE_ON_A_CPU = ("peak_active_bytes", "peak_reserved_bytes", "synchronisation")


def run(tmp_path: Path, launcher: FakeLauncher, suite: SuiteSpec | None = None) -> Run:
    return run_suite(suite or make_suite(), tmp_path / "run", launcher, Silent(), ENVIRONMENT)


def by_strategy(found: Run) -> dict[str, LaunchRecord]:
    return {record.case.job.strategy: record for record in found.launches}


def proof_of(record: LaunchRecord) -> Proof:
    assert record.proof is not None
    return record.proof


def raising(error: BaseException, strategy: str = "") -> FakeLauncher:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        if strategy in ("", case.job.strategy):
            raise error
        return good(case, folder)

    return FakeLauncher(outcome)


def tracing(*events: dict[str, Any], strategy: str = "ddp", ranks: tuple[int, ...] = (0, 1)) -> FakeLauncher:
    """Some ranks of cases of ``strategy`` leave a trace with one step and these events."""

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        for rank in ranks if case.job.strategy == strategy else ():
            write(trace_file(folder, rank), [step(1, 0, 100), *events], rank=rank)
        return LaunchOutcome()

    return FakeLauncher(outcome)


def test_metrics_of_a_case_in_closed_form(tmp_path: Path) -> None:
    record = by_strategy(run(tmp_path, FakeLauncher()))["ddp"]
    model = load_model("llama-tiny")
    # rank 1 is the slower one: 0.15, 0.25, 0.35 s; the median of the maxima is 0.25 s
    tokens = 4 * 256 / 0.25 / 2
    measured = {name: value for name, value in record.metrics.items() if name not in _NONE_ON_A_CPU}
    assert {record.metrics[name] for name in _NONE_ON_A_CPU} == {None}
    assert measured == pytest.approx(
        {
            "step_time_s": 0.25,
            "tokens_per_s_gpu": tokens,
            "tflops": tokens * flops_per_token(model, 256) / 1e12,
            "mfu": tokens * flops_per_token(model, 256) / 1e11,
            "peak_memory_bytes": 2000,
            "rss_bytes": 5000,
            "compute_s": 50e-6,
            "comm_s": 40e-6,
            "exposed_comm_s": 20e-6,
            "overlap_ratio": 0.5,
            "idle_s": 30e-6,
            "perturbation": 0.3 / 0.25,
            "loss_parity": 0.0,
        }
    )
    assert record.metrics.keys() == METRICS.keys() - DERIVED
    assert record.peak_source.startswith("measured fp32 matrix product, 1 thread")
    assert [list(times) for times in record.step_times_s] == [
        pytest.approx([0.1, 0.2, 0.3]),
        pytest.approx([0.15, 0.25, 0.35]),
    ]


def test_every_round_launches_every_case_references_first_and_the_observer_sees_it(tmp_path: Path) -> None:
    launcher, observer = FakeLauncher(), Silent()
    found = run_suite(make_suite(rounds=3), tmp_path / "run", launcher, observer, ENVIRONMENT)
    assert len(found.launches) == found.header.planned == 9
    assert [r.round for r in found.launches] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [c.job.strategy for c in launcher.launched[:2]] == ["single", "ddp"]
    assert found.end is not None
    assert (found.end.cases, found.end.states, found.end.interrupted) == (9, {"ok": 9}, False)
    assert observer.told[:4] == ["start 1/9 single 0", "measure 1/1", "end ok", "start 2/9 ddp 0"]
    for record in found.launches:
        assert len(record.traces) == record.case.job.gpus
        assert all((tmp_path / "run" / trace).is_file() for trace in record.traces)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Run) == found


def test_round_order_favours_no_strategy() -> None:
    strategies = ["ddp", "fsdp2", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp"]
    cases = make_suite(matrix={**AXES, "strategy": strategies}).cases()
    orders = {tuple(c.job.strategy for c in round_order(cases, round_)) for round_ in range(8)}
    assert [case.job.strategy for case in round_order(cases, 0)[:2]] == ["single", "ddp"]
    assert all(sorted(order) == sorted(["single", *strategies]) for order in orders)
    assert len({order.index("ddp") for order in orders}) > 3, "not even ddp keeps its place"


def test_a_table_runs_its_own_number_of_rounds(tmp_path: Path) -> None:
    tables = [{**AXES, "strategy": "ddp"}, {**AXES, "strategy": "refshard-fsdp", "seq_len": 64, "rounds": 1}]
    found = run(tmp_path, FakeLauncher(), make_suite(matrix=tables, rounds=2))
    assert found.header.planned == len(found.launches) == 6
    assert sorted((r.round, r.case.job.strategy) for r in found.launches) == [
        (0, "ddp"), (0, "refshard-fsdp"), (0, "single"), (0, "single"), (1, "ddp"), (1, "single"),
    ]  # fmt: skip


def test_a_failed_case_is_recorded_without_paths_and_the_run_goes_on(tmp_path: Path) -> None:
    line = 'File "/home/me/refshard/refshard/engine/unit.py", line 3, in refill'
    launch = LaunchOutcome(error="rank 0 ended with exit status 1", log_tail=("Traceback", line, "ValueError: no"))
    found = by_strategy(run(tmp_path, leaving("ddp", {"state": "failed", "error": "ValueError: no"}, launch=launch)))
    assert (found["ddp"].state, found["ddp"].error) == ("failed", "rank 0: ValueError: no")
    assert found["ddp"].log_tail == ("Traceback", 'File "refshard/engine/unit.py", line 3, in refill', "ValueError: no")
    proof = proof_of(found["refshard-yafsdp"])
    assert found["refshard-yafsdp"].state == "ok"
    assert (proof.bit_identical_to_ddp, "no ddp case" in proof.bits_note) == (None, True)


LOST = {"state": "failed", "error": "RuntimeError: connection closed by peer"}
KILLED = LaunchOutcome(out_of_memory=True, failed_rank=1, error="rank 1 ended with signal 9 (SIGKILL)")


@pytest.mark.parametrize(
    ("ranks", "launch", "state", "error"),
    [
        ([LOST, {}], LaunchOutcome(timed_out=True), "timeout",
         "did not finish within time_limit_s = 600; the ranks were killed"),
        ([LOST, {"state": "oom", "error": "OutOfMemoryError: 3 GiB"}], None, "oom", "rank 1: OutOfMemoryError: 3 GiB"),
        ([LOST], KILLED, "oom", "rank 1 ended with signal 9 (SIGKILL): killed by the kernel's OOM killer"),
        ([{"state": "unsupported", "error": "no forward without backward"}],
         LaunchOutcome(failed_rank=1, error="rank 1 ended with exit status 1"), "unsupported",
         "rank 1: no forward without backward"),
        ([LOST | {"failed_at_s": 9.2}, {"state": "failed", "error": "ValueError: no", "failed_at_s": 9.1}],
         LaunchOutcome(failed_rank=0, error="rank 0 ended with exit status 1"), "failed", "rank 1: ValueError: no"),
    ],
    ids=["timeout", "oom", "killed for memory", "unsupported", "the first error is the cause"],
)  # fmt: skip
def test_terminal_states(
    tmp_path: Path, ranks: list[dict[str, Any]], launch: LaunchOutcome | None, state: str, error: str
) -> None:
    record = by_strategy(run(tmp_path, leaving("ddp", *ranks, launch=launch)))["ddp"]
    assert (record.state, record.error) == (state, error)


@pytest.mark.parametrize(
    ("left", "error"),
    [
        (None, "rank 1 ended with signal 9 (SIGKILL)"),
        ('{"rank": 1, "state": "ok", "losses": [null]}', "a rank left a damaged result: Expected `float`, got `null`"),
    ],
)
def test_a_missing_or_damaged_result_fails_its_case_only(tmp_path: Path, left: str | None, error: str) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy != "ddp":
            return LaunchOutcome()
        write_rank(case, folder, 0, **LOST)
        rank_file(folder, 1).unlink()
        if left is not None:
            rank_file(folder, 1).write_text(left)
        return LaunchOutcome(failed_rank=1, error="rank 1 ended with signal 9 (SIGKILL)")

    found = by_strategy(run(tmp_path, FakeLauncher(outcome)))
    assert found["ddp"].state == "failed"
    assert str(found["ddp"].error).startswith(error)
    assert found["refshard-yafsdp"].state == "ok"


GATHERS = (CollectiveCount(op="all_gather", count=2, bytes=8),)
SEND = CollectiveCount(op="send", count=1, bytes=8)
SMALL, LARGE = (CollectiveCount(op="all_to_all", count=1, bytes=size) for size in (8, 16))


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([{"wrapped_units": ()}], "the model was not wrapped: it has no unit"),
        ([{"wrapped_units": ("root", "model.layers.1.mlp")}],
         "blocks outside any unit: model.layers.0, " + ", ".join(f"model.layers.{i}" for i in range(2, 6))),
        ([{"step_times_s": (0.1,)}], "a rank left fewer losses or step times than steps"),
        ([{"announced": GATHERS}], "the plan announced 2 all_gather of 8 B, the trace shows 1 all_reduce of 400 B"),
        ([{"losses": (5.001,) * 13}], "losses differ from one unsharded rank by 0.22, more than 1e-05"),
        ([{}, {"parameters_sha256": "other"}], "the ranks ended with different parameters"),
        ([{}, {"announced": (*ANNOUNCED, SEND)}],  # rank 1's own, of which rank 0 has none
         "the plan announced 1 all_reduce of 400 B, 1 send of 8 B, the trace shows 1 all_reduce of 400 B"),
    ],
)  # fmt: skip
def test_what_is_not_proven_does_not_count(tmp_path: Path, ranks: list[dict[str, Any]], reason: str) -> None:
    record = by_strategy(run(tmp_path, leaving("refshard-yafsdp", *ranks)))["refshard-yafsdp"]
    assert (record.state, record.error) == ("failed", f"proof of run: {reason}")
    assert proof_of(record).announced == ranks[0].get("announced", ANNOUNCED), "rank 0's"


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [(ANNOUNCED, (), True), ((SMALL,), (LARGE,), False), ((SMALL,), (LARGE, SMALL), True)],
    ids=["none", "ranks own matrices of different sizes", "more"],
)
def test_all_ranks_announce_the_same_collectives(
    tmp_path: Path, first: tuple[CollectiveCount, ...], second: tuple[CollectiveCount, ...], differ: bool
) -> None:
    record = by_strategy(run(tmp_path, leaving("ddp", {"announced": first}, {"announced": second})))["ddp"]
    assert ("the ranks announced different collectives" in str(record.error)) is differ


def test_a_trace_that_holds_less_than_was_asked_for_is_no_proof(tmp_path: Path) -> None:
    suite = make_suite(case={"global_batch": 4, "measured_steps": 3, "traced_steps": 2, "device": "cpu"})
    record = by_strategy(run(tmp_path, FakeLauncher(), suite))["ddp"]
    assert record.state == "failed"
    assert "the traces hold 2 steps, 4 were asked for" in str(record.error)


def test_unknown_collectives_and_silent_ones_are_no_proof(tmp_path: Path) -> None:
    launcher = tracing(event("c10d::send", 5, 1, **shaped([[100]], ["float"])))
    record = by_strategy(run(tmp_path, launcher))["ddp"]
    assert "the trace shows 1 send of 400 B" in str(record.error)
    assert "collectives were issued, but the trace shows no communication" in str(record.error)


def test_collectives_of_unknown_size_are_not_checked_and_leave_the_timing_valid(tmp_path: Path) -> None:
    reduce = event("c10d::allreduce_", 5, 1, **shaped([[[100]], []], ["TensorList", ""]))
    launcher = tracing(reduce, event("gloo:all_reduce", 40, 40, cat="user_annotation", tid=2), ranks=(1,))
    record = by_strategy(run(tmp_path, launcher))["ddp"]
    assert (record.state, record.error, record.metrics["step_time_s"]) == ("ok", None, 0.25)
    assert proof_of(record).collectives_note.startswith(
        "not checked, because rank 1: the trace does not hold the size of all_reduce"
    )


def test_ddp_on_one_gpu_is_proved_by_its_real_trace(tmp_path: Path) -> None:
    """NCCL launches no kernel for a group of one rank; DDP's operators hide the dtype in a list of tensors."""
    parameters = load_model("llama3.2-1b").params

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        announced = (CollectiveCount(op="all_reduce", count=65, bytes=4 * parameters),)
        write_rank(case, folder, 0, **({"announced": announced} if case.job.strategy == "ddp" else {}))
        if case.job.strategy == "ddp":
            shutil.copy(H200_DDP, trace_file(folder, 0))
        return LaunchOutcome()

    matrix = {"strategy": ["single", "ddp"], "gpus": [1], "model": ["llama3.2-1b"]}
    record = by_strategy(run(tmp_path, FakeLauncher(outcome), make_suite(matrix=matrix)))["ddp"]
    proof = proof_of(record)
    assert (record.state, record.error, record.metrics["comm_s"]) == ("ok", None, 0.0)
    assert (proof.traced, proof.collectives_note) == (proof.announced, "")


def test_flops_of_inference_are_those_of_forward_and_the_convention_says_so(tmp_path: Path) -> None:
    suite = make_suite(matrix={**AXES, "workload": ["training", "inference"]})
    found = {(r.case.job.strategy, r.case.job.workload): r for r in run(tmp_path, FakeLauncher(), suite).launches}
    training, inference = (found["ddp", workload] for workload in ("training", "inference"))
    assert training.flops_convention == "C: 6(N-E) + 6LHQT, causal half (Megatron)"
    assert inference.flops_convention.startswith("C: 2(N-E) + 2LHQT, causal half, forward only")
    assert training.flops_per_token is not None
    assert inference.flops_per_token == training.flops_per_token / 3
    assert inference.metrics["mfu"] == pytest.approx((training.metrics["mfu"] or 0) / 3)


def test_ranks_may_infer_without_communication_but_not_train(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.job.gpus):
            write_rank(case, folder, rank, announced=())
            write(trace_file(folder, rank), [step(1, 0, 100), event("aten::mm", 10, 50)], rank=rank)
        return LaunchOutcome()

    suite = make_suite(matrix={**AXES, "workload": ["training", "inference"]})
    found = {
        (r.case.job.strategy, r.case.job.workload): r for r in run(tmp_path, FakeLauncher(outcome), suite).launches
    }
    assert found["ddp", "inference"].state == "ok"
    assert "training on several ranks needs them" in str(found["ddp", "training"].error)


def test_recompute_is_recorded_and_counts_for_nothing(tmp_path: Path) -> None:
    suite = make_suite(matrix={**AXES, "checkpointing": ["none", "every-4", [0, 5]]})
    records = run(tmp_path, FakeLauncher(), suite).launches
    found = {r.case.job.checkpointing: r for r in records if r.case.job.strategy == "ddp"}
    assert {policy: r.recompute for policy, r in found.items()} == {
        "none": "none",
        "every-4": "forward of 1 of 6 layers, not counted",
        (0, 5): "forward of 2 of 6 layers, not counted",
    }
    assert len({r.flops_per_token for r in found.values()}) == 1


def test_a_reference_that_accumulates_is_compared_with_one_that_does_not(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.microbatches > 1:
            write_rank(case, folder, 0, losses=(5.5,) * case.protocol.total_steps)
        return LaunchOutcome()

    launcher = FakeLauncher(outcome)
    records = run(tmp_path, launcher, make_suite(matrix={**AXES, "microbatches": [2, 1]}, rounds=2)).launches
    assert launcher.launched[0] == launcher.launched[0].reference()
    alone = {r.case.job.microbatches: r for r in records if r.case.job.strategy == "single"}
    assert alone[1].state == "ok"
    assert "losses differ from one unsharded rank by" in str(alone[2].error)


@pytest.mark.parametrize(
    ("axes", "off", "state"),
    [
        ({}, 2e-5, "failed"),
        ({"precision": "bf16"}, 1.9e-2, "ok"),
        ({"precision": "bf16"}, 2.1e-2, "failed"),
        ({"optimizer": "adamw-8bit"}, 9e-4, "ok"),
        ({"optimizer": "adamw-8bit"}, 1.1e-3, "failed"),
        ({"optimizer": "muon"}, 4.5e-4, "ok"),
        ({"optimizer": "muon"}, 5.5e-4, "failed"),
    ],
)
def test_losses_may_differ_by_what_the_arithmetic_loses(
    tmp_path: Path, axes: dict[str, object], off: float, state: str
) -> None:
    launcher = leaving("", {"losses": tuple((5.0 - 0.1 * i) * (1 + off) for i in range(50))})
    record = by_strategy(run(tmp_path, launcher, make_suite(matrix={**AXES, **axes})))["refshard-fsdp"]
    assert record.state == state, record.error


def test_a_reference_that_does_not_end_well_leaves_parity_unknown_and_the_timing_valid(tmp_path: Path) -> None:
    ddp = by_strategy(run(tmp_path, leaving("single", launch=LaunchOutcome(timed_out=True))))["ddp"]
    assert (ddp.state, ddp.metrics["step_time_s"], ddp.metrics["loss_parity"]) == ("ok", 0.25, None)
    assert proof_of(ddp).parity_note == (
        "not compared, because the case of one unsharded rank ended in state timeout: did not finish within time_limit_"
        "s = 600; the ranks were killed"
    )


@pytest.mark.parametrize(
    ("axes", "note"),
    [
        ({}, "the final parameters differ, although the order cannot matter with two ranks"),
        ({"microbatches": [2]}, "DDP sums microbatches before reducing; reducing each microbatch changes the order"),
    ],
)
def test_bits_are_compared_with_ddp(tmp_path: Path, axes: dict[str, object], note: str) -> None:
    suite = make_suite(matrix={**AXES, "strategy": ["ddp", "refshard-fsdp", "refshard-yafsdp"], **axes})
    found = by_strategy(run(tmp_path, leaving("refshard-fsdp", {"parameters_sha256": "other"}), suite))
    same, other = proof_of(found["refshard-yafsdp"]), proof_of(found["refshard-fsdp"])
    assert (same.bit_identical_to_ddp, same.bits_note) == (True, "")
    assert same.announced == same.traced == ANNOUNCED
    assert (other.bit_identical_to_ddp, note in other.bits_note) == (False, True)


def test_what_ranks_saw_beside_their_steps_is_recorded(tmp_path: Path) -> None:
    """The longest compilation, how busy the machine was, and its memory, which warns of retries."""
    seen = RankLoad(
        host="h", cores=2, probe_before_s=0.05, probe_after_s=0.06, wall_s=2.0, own_cpu_s=1.0, host_cpu_s=3.0
    )
    fields = dict.fromkeys(GpuMemory.__struct_fields__, 0)
    less = GpuMemory(**{**fields, "active_bytes": 60, "reserved_bytes": 70, "total_bytes": 80})
    more = GpuMemory(**{**fields, "active_bytes": 50, "reserved_bytes": 75, "total_bytes": 80, "retries": 2})
    busier = msgspec.structs.replace(seen, probe_after_s=0.07)
    ranks = [
        {"compile_s": 20.0, "load": seen, "gpu_memory": less}, {"compile_s": 21.0, "load": busier, "gpu_memory": more}
    ]  # fmt: skip
    found = by_strategy(run(tmp_path, leaving("ddp", *ranks)))
    ddp, single = found["ddp"], found["single"]
    assert (ddp.compile_s, single.compile_s) == (21.0, None)
    assert ddp.load == Load(probe_before_s=0.05, probe_after_s=0.07, other_cores=0.5, cores=2)
    assert single.load is None
    assert ddp.gpu_memory == (less, more)
    assert (ddp.metrics["peak_active_bytes"], ddp.metrics["peak_reserved_bytes"]) == (60, 75)
    (warning,) = ddp.warnings
    assert warning.startswith("GPU memory ran short 2 times during the measured steps (2 on rank 1): ")


def test_a_gpus_peak_is_that_of_its_profile_and_throttling_is_a_warning(tmp_path: Path) -> None:
    hot, device = GpuUse(gpu=1, samples=4, power_w=700.0, throttled={"power cap": 3}), "NVIDIA H100 80GB HBM3"
    record = by_strategy(run(tmp_path, leaving("ddp", {"device": device, "gpu_use": (hot,)}, {"device": device})))[
        "ddp"
    ]
    assert record.gpu_use == (hot,)
    assert record.warnings == ("GPU 1 was throttled (power cap) during the measured steps: in 3 of 4 samples",)
    assert record.peak_flops_per_s == 67e12
    assert record.metrics["mfu"] == pytest.approx((record.metrics["tflops"] or 0) / 67)


def test_a_folder_that_holds_something_is_refused_untouched(tmp_path: Path) -> None:
    kept = tmp_path / "run" / "precious"
    kept.parent.mkdir()
    kept.write_text("x")
    launcher = FakeLauncher()
    with pytest.raises(StoreError, match="the folder is not empty; name a new one, or resume the run in it"):
        run(tmp_path, launcher)
    assert kept.read_text() == "x"
    assert not launcher.launched


@pytest.mark.parametrize(
    ("matrix", "shared", "message"),
    [
        ({"strategy": ["dpp"]}, {}, r"strategy: no strategy 'dpp'; did you mean 'ddp'\?"),
        ({"model": ["llama-huge"]}, {}, r"model: no preset 'llama-huge'"),
        ({"gpus": [4096]}, {"batch_per_rank": 1}, r"gpus: 4096 ranks x 1 thread\(s\) exceed the \d+ cores"),
        ({}, {"global_batch": 4, "data": "/no/such.npy"}, "no/such.npy"),
        ({}, {"global_batch": 4, "checkpointing": "every-7"}, "its number must be at most the 6 layers, got 'every-7'"),
        ({}, {"global_batch": 4, "checkpointing": [6]}, r"checkpointing: layers must lie in 0..5, got 6"),
    ],
)
def test_wrong_suites_are_refused_before_anything_is_launched(
    matrix: dict[str, list[object]], shared: dict[str, object], message: str
) -> None:
    whole = {"strategy": ["ddp"], "gpus": [2], "model": ["llama-tiny"], **matrix}
    suite = make_suite(matrix=whole, case={"device": "cpu", **(shared or {"global_batch": 4})})
    with pytest.raises(SpecError, match=message):
        check_suite(suite, FakeLauncher(), oversubscribe=False)


def test_oversubscription_is_allowed_when_asked_for() -> None:
    matrix = {"strategy": ["ddp"], "gpus": [64], "model": ["llama-tiny"]}
    suite = make_suite(matrix=matrix, case={"batch_per_rank": 1, "device": "cpu"})
    assert len(check_suite(suite, FakeLauncher(), oversubscribe=True)) == 2


def test_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        mark_latest(tmp_path / name)
    assert (tmp_path / "latest").resolve() == tmp_path / "b"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device", "logs"), LaunchError),
    ],
)
def test_an_interruption_or_a_full_disk_here_closes_the_store_and_ends_the_run(
    tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    with pytest.raises(raised) as ended:
        run(tmp_path, raising(error, "ddp"))
    found = read_run(tmp_path / "run")
    assert [r.case.job.strategy for r in found.launches] == ["single"]
    assert found.end is not None
    assert (found.end.interrupted, found.end.states) == (True, {"ok": 1})
    said = "cannot be launched ([Errno 28] No space left on device: 'logs'); correct that and resume "
    assert raised is KeyboardInterrupt or said in str(ended.value)


def test_a_resumed_run_launches_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    """Killed while the fourth of six launches ran; the second had failed."""

    def dying(case: Case, folder: Path) -> LaunchOutcome:
        if len(launcher.launched) == 2:
            return LaunchOutcome(failed_rank=1, error="rank 1 ended with signal 9 (SIGKILL)")
        if len(launcher.launched) == 4:
            raise RuntimeError("killed")
        return good(case, folder)

    launcher = FakeLauncher(dying)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, launcher, make_suite(rounds=2))
    folder = tmp_path / "run"
    path = folder / RECORDS
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))  # no closing record: it was killed
    before = read_run(folder)
    assert [record.state for record in before.launches] == ["ok", "failed", "ok"]

    second, observer = FakeLauncher(), Silent()
    after = resume_run(folder, second, observer, ENVIRONMENT)
    assert second.launched[0].job.strategy == "ddp", "what failed comes first, as it did"
    assert len(second.launched) == 4
    assert observer.told[0] == "start 1/4 ddp 0"
    assert len({(record.spec_hash, record.round) for record in after.launches}) == len(after.launches) == 6
    assert all(record.state == "ok" for record in after.launches)
    kept = [record for record in before.launches if record in after.launches]
    assert kept == [before.launches[0], before.launches[2]], "what had ended well is kept as it was"
    assert after.end is not None
    assert (after.end.cases, after.end.states, after.end.interrupted) == (6, {"ok": 6}, False)

    data = path.read_bytes()
    assert resume_run(folder, FakeLauncher(), Silent(), ENVIRONMENT) == after
    assert path.read_bytes() == data, "nothing was missing"


def test_a_resumption_that_is_cut_short_counts_what_it_has_not_repeated_yet(tmp_path: Path) -> None:
    failed = {"state": "failed", "error": "no"}
    before = run(tmp_path, leaving("", failed, launch=LaunchOutcome(failed_rank=1, error="rank 1 failed")))
    with pytest.raises(KeyboardInterrupt):
        resume_run(tmp_path / "run", raising(KeyboardInterrupt()), Silent(), ENVIRONMENT)
    found = read_run(tmp_path / "run")
    assert found.launches == before.launches
    assert found.end is not None
    assert (found.end.cases, found.end.states, found.end.interrupted) == (3, {"ok": 1, "failed": 2}, True)


def test_results_that_are_no_success_are_kept(tmp_path: Path) -> None:
    run(tmp_path, FakeLauncher(lambda _case, _folder: LaunchOutcome(timed_out=True)))
    launcher = FakeLauncher()
    assert {r.state for r in resume_run(tmp_path / "run", launcher, Silent(), ENVIRONMENT).launches} == {"timeout"}
    assert not launcher.launched


def test_a_run_is_not_resumed_with_another_file_under_the_same_name(tmp_path: Path) -> None:
    model = tmp_path / "mine.toml"
    preset = Path(__file__).parents[2] / "profiles" / "models" / "llama-tiny.toml"
    model.write_text(preset.read_text())
    suite = make_suite(matrix={"strategy": ["ddp"], "gpus": [2], "model": [str(model)]})
    started = run_suite(suite, tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)
    assert list(started.header.files) == [str(model)]
    assert resume_run(tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT).end is not None
    model.write_text(preset.read_text() + "# another word\n")
    with pytest.raises(SpecError, match=r"mine\.toml has changed; start a new run"):
        resume_run(tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)


def test_a_run_is_not_resumed_where_something_changed(tmp_path: Path) -> None:
    run(tmp_path, FakeLauncher())
    folder, launcher = tmp_path / "run", FakeLauncher()
    for environment, suite, message in (
        (msgspec.structs.replace(ENVIRONMENT, torch="2.14.0"), None, "torch was '2.13.0' and is '2.14.0'"),
        (ENVIRONMENT, make_suite(rounds=3), "the suite's rounds was 1 and is 3"),
    ):
        with pytest.raises(SpecError, match=f"run run cannot be resumed: {message}; start a new run"):
            resume_run(folder, launcher, Silent(), environment, suite=suite)
    assert not launcher.launched
    assert resume_run(folder, launcher, Silent(), ENVIRONMENT, suite=make_suite()).end is not None
