"""Suite to records, with a launcher that starts nothing."""

import shutil
from pathlib import Path

import msgspec
import pytest

from refshard.errors import LaunchError, SpecError, StoreError
from refshard.flops import flops_per_token
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.load import RankLoad
from refshard.measure.rank import rank_file, trace_file
from refshard.measure.run import check_suite, mark_latest, resume_run, round_order, run_suite
from refshard.measure.store import RECORDS, read_run
from refshard.records import DERIVED, METRICS, CollectiveCount, GpuMemory, GpuUse, LaunchRecord, Load, Run
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.specs.suite import SuiteSpec
from tests.analysis.handmade import event, shaped, step, write
from tests.measure.fakes import ANNOUNCED, ENVIRONMENT, FakeLauncher, Silent, good, make_suite, write_rank

H200_DDP = Path(__file__).parents[1] / "analysis/h200/ddp.json.gz"
_NONE_ON_A_CPU = ("peak_active_bytes", "peak_reserved_bytes", "synchronisation")


def run(tmp_path: Path, launcher: FakeLauncher, suite: SuiteSpec | None = None) -> Run:
    return run_suite(suite or make_suite(), tmp_path / "run", launcher, Silent(), ENVIRONMENT)


def by_strategy(found: Run) -> dict[str, LaunchRecord]:
    return {record.case.job.strategy: record for record in found.launches}


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
    assert record.step_times_s[0] == pytest.approx((0.1, 0.2, 0.3))
    assert record.step_times_s[1] == pytest.approx((0.15, 0.25, 0.35))


def test_every_round_launches_every_case_references_first(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    found = run(tmp_path, launcher, make_suite(rounds=3))
    assert len(found.launches) == found.header.planned == 9
    assert [r.round for r in found.launches] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [c.job.strategy for c in launcher.launched[:2]] == ["single", "ddp"]
    assert found.end is not None
    assert (found.end.cases, found.end.states, found.end.interrupted) == (9, {"ok": 9}, False)


def test_round_order_favours_no_strategy() -> None:
    strategies = ["ddp", "fsdp2", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp"]
    cases = make_suite(matrix={"strategy": strategies, "gpus": [2], "model": ["llama-tiny"]}).cases()
    orders = {tuple(c.job.strategy for c in round_order(cases, round_)) for round_ in range(8)}
    assert round_order(cases, 0)[0].job.strategy == "single"
    assert round_order(cases, 0)[1].job.strategy == "ddp"
    assert all(sorted(order) == sorted(["single", *strategies]) for order in orders)
    assert len({order.index("ddp") for order in orders}) > 3, "not even ddp keeps its place"


def test_a_failed_case_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        if case.job.strategy == "ddp":
            write_rank(case, folder, 0, state="failed", error="ValueError: no")
            return LaunchOutcome(
                error="rank 0 ended with exit status 1", log_tail=("Traceback", told, "ValueError: no")
            )
        return good(case, folder)

    told = 'File "/home/me/refshard/refshard/engine/unit.py", line 3, in refill'
    found = by_strategy(run(tmp_path, FakeLauncher(outcome)))
    assert (found["ddp"].state, found["ddp"].error) == ("failed", "rank 0: ValueError: no")
    assert found["ddp"].log_tail == ("Traceback", 'File "refshard/engine/unit.py", line 3, in refill', "ValueError: no")
    assert found["refshard-yafsdp"].state == "ok"
    proof = found["refshard-yafsdp"].proof
    assert proof is not None
    assert proof.bit_identical_to_ddp is None
    assert "no ddp case" in proof.bits_note


@pytest.mark.parametrize(
    ("launch", "changes", "state", "error"),
    [
        (
            LaunchOutcome(timed_out=True),
            {},
            "timeout",
            "did not finish within time_limit_s = 600; the ranks were killed",
        ),
        (
            LaunchOutcome(),
            {"state": "oom", "error": "OutOfMemoryError: 3 GiB"},
            "oom",
            "rank 1: OutOfMemoryError: 3 GiB",
        ),
    ],
)
def test_terminal_states(
    tmp_path: Path, launch: LaunchOutcome, changes: dict[str, str], state: str, error: str
) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy != "ddp":
            return LaunchOutcome()
        write_rank(case, folder, 0, state="failed", error="RuntimeError: connection closed by peer")
        write_rank(case, folder, 1, **changes)
        return launch

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert (record.state, record.error) == (state, error)


def test_a_rank_that_left_nothing_is_a_failure_with_the_launchers_cause(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        write_rank(case, folder, 0)
        if case.job.gpus == 1:
            return LaunchOutcome()
        write_rank(case, folder, 0, state="failed", error="RuntimeError: connection closed by peer")
        return LaunchOutcome(failed_rank=1, error="rank 1 ended with signal 9 (SIGKILL)")

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert (record.state, record.error) == ("failed", "rank 1 ended with signal 9 (SIGKILL)")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wrapped_units": ()}, "the model was not wrapped: it has no unit"),
        (
            {"wrapped_units": ("root", "model.layers.1.mlp")},
            "blocks outside any unit: model.layers.0, " + ", ".join(f"model.layers.{i}" for i in range(2, 6)),
        ),
        ({"step_times_s": (0.1,)}, "a rank left fewer losses or step times than steps"),
        (
            {"announced": (CollectiveCount(op="all_gather", count=2, bytes=8),)},
            "the plan announced 2 all_gather of 8 B, the trace shows 1 all_reduce of 400 B",
        ),
        ({"losses": (5.001,) * 13}, "losses differ from one unsharded rank by 0.22, more than 1e-05"),
    ],
)
def test_what_is_not_proven_does_not_count(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "refshard-yafsdp":
            for rank in range(2):
                write_rank(case, folder, rank, **changes)
        return LaunchOutcome()

    suite = make_suite()
    record = by_strategy(run(tmp_path, FakeLauncher(outcome), suite))["refshard-yafsdp"]
    assert (record.state, record.error) == ("failed", f"proof of run: {reason}")


def test_a_trace_that_holds_less_than_was_asked_for_is_no_proof(tmp_path: Path) -> None:
    suite = make_suite(case={"global_batch": 4, "measured_steps": 3, "traced_steps": 2, "device": "cpu"})
    record = by_strategy(run(tmp_path, FakeLauncher(), suite))["ddp"]
    assert record.state == "failed"
    assert "the traces hold 2 steps, 4 were asked for" in str(record.error)


def test_unknown_collectives_and_silent_ones_are_no_proof(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "ddp":
            events = [step(1, 0, 100), event("c10d::send", 5, 1, **shaped([[100]], ["float"]))]
            for rank in range(2):
                write(trace_file(folder, rank), events, rank=rank)
        return LaunchOutcome()

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert "the trace shows 1 send of 400 B" in str(record.error)
    assert "collectives were issued, but the trace shows no communication" in str(record.error)


def test_collectives_of_unknown_size_are_not_checked_and_leave_the_timing_valid(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "ddp":
            events = [step(1, 0, 100), event("c10d::allreduce_", 5, 1, **shaped([[[100]], []], ["TensorList", ""])),
                      event("gloo:all_reduce", 40, 40, cat="user_annotation", tid=2)]  # fmt: skip
            write(trace_file(folder, 1), events, rank=1)
        return LaunchOutcome()

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert record.proof is not None
    assert (record.state, record.error, record.metrics["step_time_s"]) == ("ok", None, 0.25)
    assert record.proof.collectives_note.startswith(
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
    assert record.proof is not None
    assert (record.state, record.error) == ("ok", None)
    assert record.proof.traced == record.proof.announced
    assert record.proof.collectives_note == ""
    assert record.metrics["comm_s"] == 0.0


def test_a_damaged_result_fails_its_case_only(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "ddp":
            rank_file(folder, 0).write_text('{"rank": 0, "state": "ok", "losses": [null]}')
        return LaunchOutcome()

    found = by_strategy(run(tmp_path, FakeLauncher(outcome)))
    assert found["ddp"].state == "failed"
    assert str(found["ddp"].error).startswith("a rank left a damaged result: Expected `float`, got `null`")
    assert found["refshard-yafsdp"].state == "ok"


def test_the_kernels_out_of_memory_killer_means_oom(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        if case.job.strategy != "ddp":
            return good(case, folder)
        return LaunchOutcome(out_of_memory=True, failed_rank=1, error="rank 1 ended with signal 9 (SIGKILL)")

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert (record.state, record.error) == (
        "oom", "rank 1 ended with signal 9 (SIGKILL): killed by the kernel's OOM killer",
    )  # fmt: skip


def test_ranks_with_different_parameters_are_no_proof(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "ddp":
            write_rank(case, folder, 1, parameters_sha256="other")
        return LaunchOutcome()

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert record.error == "proof of run: the ranks ended with different parameters"


AXES = {"strategy": ["single", "ddp", "refshard-fsdp"], "gpus": [2], "model": ["llama-tiny"]}


def test_flops_of_inference_are_those_of_forward_and_the_convention_says_so(tmp_path: Path) -> None:
    suite = make_suite(matrix={**AXES, "workload": ["training", "inference"]})
    found = {(r.case.job.strategy, r.case.job.workload): r for r in run(tmp_path, FakeLauncher(), suite).launches}
    training, inference = (found["ddp", workload] for workload in ("training", "inference"))
    assert training.flops_convention == "A: 6(N-E) + 12LHQT (torchtitan)"
    assert inference.flops_convention.startswith("A: 2(N-E) + 4LHQT, forward only")
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


def test_a_reference_that_recomputes_or_accumulates_is_held_against_one_that_does_not(tmp_path: Path) -> None:
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


def test_sharded_gradients_of_microbatches_are_summed_in_another_order_than_ddps(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.job.gpus):
            write_rank(case, folder, rank, parameters_sha256=case.job.strategy)
        return LaunchOutcome()

    records = run(tmp_path, FakeLauncher(outcome), make_suite(matrix={**AXES, "microbatches": [2]})).launches
    (fsdp,) = (r.proof for r in records if r.case.job.strategy == "refshard-fsdp")
    assert fsdp is not None
    assert fsdp.bits_note.endswith("DDP sums microbatches before reducing; reducing each microbatch changes the order")


MESSAGES = (CollectiveCount(op="send", count=1, bytes=8),)


def test_each_rank_is_held_to_its_own_messages_and_all_to_the_same_collectives(tmp_path: Path) -> None:
    def outcome(second: tuple[CollectiveCount, ...], first: tuple[CollectiveCount, ...] = ()) -> FakeLauncher:
        def leave(case: Case, folder: Path) -> LaunchOutcome:
            for rank in range(case.job.gpus):
                announced = second if rank else first
                write_rank(case, folder, rank, **({"announced": announced} if rank or first else {}))
            return LaunchOutcome()

        return FakeLauncher(leave)

    found = by_strategy(run(tmp_path / "a", outcome((*ANNOUNCED, *MESSAGES))))["ddp"]
    assert found.error == (
        "proof of run: the plan announced 1 all_reduce of 400 B, 1 send of 8 B, the trace shows 1 all_reduce of 400 B"
    ), "rank 1's own, of which rank 0 has none"
    assert found.proof is not None
    assert found.proof.announced == ANNOUNCED
    found = by_strategy(run(tmp_path / "b", outcome(())))["ddp"]
    assert "the ranks announced different collectives" in str(found.error)
    one, two = (CollectiveCount(op="all_to_all", count=1, bytes=size) for size in (8, 16))
    found = by_strategy(run(tmp_path / "c", outcome((two,), (one,))))["ddp"]
    assert "the ranks announced" not in str(found.error), "they own matrices of different sizes"
    found = by_strategy(run(tmp_path / "d", outcome((two, one), (one,))))["ddp"]
    assert "the ranks announced different collectives" in str(found.error)


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
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        scale = 1.0 if case == case.reference() else 1.0 + off
        for rank in range(case.job.gpus):
            write_rank(case, folder, rank, losses=(5.0 * scale,) * case.protocol.total_steps)
        return LaunchOutcome()

    record = by_strategy(run(tmp_path, FakeLauncher(outcome), make_suite(matrix={**AXES, **axes})))["refshard-fsdp"]
    assert record.state == state, record.error


def test_the_longest_compilation_is_recorded_apart_from_the_steps(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.job.gpus):
            write_rank(case, folder, rank, compile_s=20.0 + rank if case.job.strategy == "ddp" else 0.0)
        return LaunchOutcome()

    found = by_strategy(run(tmp_path, FakeLauncher(outcome)))
    assert (found["ddp"].compile_s, found["single"].compile_s) == (21.0, None)


def test_how_busy_the_machine_was_is_recorded_of_all_ranks(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.job.gpus):
            seen = RankLoad(
                host="h", cores=2, probe_before_s=0.05, probe_after_s=(0.06, 0.07)[rank], wall_s=2.0, own_cpu_s=1.0,
                host_cpu_s=3.0,
            )  # fmt: skip
            write_rank(case, folder, rank, load=seen if case.job.strategy == "ddp" else None)
        return LaunchOutcome()

    found = by_strategy(run(tmp_path, FakeLauncher(outcome)))
    assert found["ddp"].load == Load(probe_before_s=0.05, probe_after_s=0.07, other_cores=0.5, cores=2)
    assert found["single"].load is None


def test_a_gpus_mfu_is_held_against_its_profile_and_throttling_is_a_warning(tmp_path: Path) -> None:
    hot = GpuUse(gpu=1, samples=4, power_w=700.0, throttled={"power cap": 3})

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.job.gpus):
            write_rank(case, folder, rank, device="NVIDIA H100 80GB HBM3", gpu_use=() if rank else (hot,))
        return LaunchOutcome()

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert record.gpu_use == (hot,)
    assert record.warnings == ("GPU 1 was throttled (power cap) during the measured steps: in 3 of 4 samples",)
    assert record.peak_flops_per_s == 67e12
    assert record.metrics["mfu"] == pytest.approx((record.metrics["tflops"] or 0) / 67)


def test_a_gpus_memory_is_kept_of_each_rank_and_retries_are_a_warning(tmp_path: Path) -> None:
    fields = dict.fromkeys(GpuMemory.__struct_fields__, 0)
    less = GpuMemory(**{**fields, "active_bytes": 60, "reserved_bytes": 70, "total_bytes": 80})
    more = GpuMemory(**{**fields, "active_bytes": 50, "reserved_bytes": 75, "total_bytes": 80, "retries": 2})

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        for rank in range(case.job.gpus):
            write_rank(case, folder, rank, gpu_memory=more if rank else less)
        return LaunchOutcome()

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert record.gpu_memory == (less, more)
    assert (record.metrics["peak_active_bytes"], record.metrics["peak_reserved_bytes"]) == (60, 75)
    (warning,) = record.warnings
    assert warning.startswith("GPU memory ran short 2 times during the measured steps (2 on rank 1): ")


def test_what_a_strategy_cannot_do_is_unsupported_with_its_reason(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        if case.job.strategy != "ddp":
            return good(case, folder)
        for rank in range(2):
            write_rank(case, folder, rank, state="unsupported", error="no forward without backward")
        return LaunchOutcome(failed_rank=1, error="rank 1 ended with exit status 1")

    record = by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"]
    assert (record.state, record.error) == ("unsupported", "rank 1: no forward without backward")


def test_a_table_runs_its_own_number_of_rounds(tmp_path: Path) -> None:
    tables = [{**AXES, "strategy": "ddp"}, {**AXES, "strategy": "refshard-fsdp", "seq_len": 64, "rounds": 1}]
    found = run(tmp_path, FakeLauncher(), make_suite(matrix=tables, rounds=2))
    assert found.header.planned == len(found.launches) == 6
    launches = [(r.round, r.case.job.strategy) for r in found.launches]
    assert sorted(launches) == [
        (0, "ddp"), (0, "refshard-fsdp"), (0, "single"), (0, "single"), (1, "ddp"), (1, "single"),
    ]  # fmt: skip


def test_a_reference_that_does_not_end_well_leaves_parity_unknown_and_the_timing_valid(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        return LaunchOutcome(timed_out=True) if case.job.strategy == "single" else good(case, folder)

    found = by_strategy(run(tmp_path, FakeLauncher(outcome)))
    ddp = found["ddp"]
    assert (ddp.state, ddp.metrics["step_time_s"], ddp.metrics["loss_parity"]) == ("ok", 0.25, None)
    assert ddp.proof is not None
    assert ddp.proof.parity_note == (
        "not compared, because the case of one unsharded rank ended in state timeout: did not finish within time_limit_"
        "s = 600; the ranks were killed"
    )


def test_bits_are_compared_with_ddp(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        good(case, folder)
        if case.job.strategy == "refshard-fsdp":
            for rank in range(2):
                write_rank(case, folder, rank, parameters_sha256="other")
        return LaunchOutcome()

    matrix = {"strategy": ["ddp", "refshard-fsdp", "refshard-yafsdp"], "gpus": [2], "model": ["llama-tiny"]}
    found = by_strategy(run(tmp_path, FakeLauncher(outcome), make_suite(matrix=matrix)))
    same, other = found["refshard-yafsdp"].proof, found["refshard-fsdp"].proof
    assert same is not None
    assert other is not None
    assert (same.bit_identical_to_ddp, same.bits_note) == (True, "")
    assert other.bit_identical_to_ddp is False
    assert other.bits_note.startswith("the final parameters differ, although the order cannot matter with two ranks")
    assert same.announced == same.traced == ANNOUNCED


def test_an_interruption_closes_the_store_and_passes_through(tmp_path: Path) -> None:
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        if case.job.strategy == "ddp":
            raise KeyboardInterrupt
        return good(case, folder)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FakeLauncher(outcome))
    found = read_run(tmp_path / "run")
    assert [r.case.job.strategy for r in found.launches] == ["single"]
    assert found.end is not None
    assert (found.end.interrupted, found.end.states) == (True, {"ok": 1})


def test_traces_are_kept_under_the_run(tmp_path: Path) -> None:
    found = run(tmp_path, FakeLauncher())
    for record in found.launches:
        assert len(record.traces) == record.case.job.gpus
        assert all((tmp_path / "run" / trace).is_file() for trace in record.traces)


def test_observer_is_told_in_order(tmp_path: Path) -> None:
    observer = Silent()
    run_suite(make_suite(), tmp_path / "run", FakeLauncher(), observer, ENVIRONMENT)
    assert observer.told[:4] == ["start 1/3 single 0", "measure 1/1", "end ok", "start 2/3 ddp 0"]


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


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    found = run(tmp_path, FakeLauncher())
    again = msgspec.json.decode(msgspec.json.encode(found), type=Run)
    assert again == found


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
    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        job = case.job
        return good(case, folder) if job.strategy == "single" else LaunchOutcome(failed_rank=1, error="rank 1 failed")

    def interrupted(_case: Case, _folder: Path) -> LaunchOutcome:
        raise KeyboardInterrupt

    before = run(tmp_path, FakeLauncher(outcome))
    with pytest.raises(KeyboardInterrupt):
        resume_run(tmp_path / "run", FakeLauncher(interrupted), Silent(), ENVIRONMENT)
    found = read_run(tmp_path / "run")
    assert found.launches == before.launches
    assert found.end is not None
    assert (found.end.cases, found.end.states, found.end.interrupted) == (3, {"ok": 1, "failed": 2}, True)


def test_what_this_process_cannot_write_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    def outcome(_case: Case, _folder: Path) -> LaunchOutcome:
        raise OSError(28, "No space left on device", "logs")

    with pytest.raises(
        LaunchError, match=r"cannot be launched \(\[Errno 28\] No space left on device: 'logs'\); correct"
    ):
        run(tmp_path, FakeLauncher(outcome))
    found = read_run(tmp_path / "run")
    assert found.end is not None
    assert found.end.interrupted


def test_the_error_that_came_first_is_the_cause(tmp_path: Path) -> None:
    """Whichever rank's process ended first."""

    def outcome(case: Case, folder: Path) -> LaunchOutcome:
        if case.job.strategy == "single":
            return good(case, folder)
        write_rank(case, folder, 0, state="failed", error="RuntimeError: connection closed by peer", failed_at_s=9.2)
        write_rank(case, folder, 1, state="failed", error="ValueError: no", failed_at_s=9.1)
        return LaunchOutcome(failed_rank=0, error="rank 0 ended with exit status 1")

    assert by_strategy(run(tmp_path, FakeLauncher(outcome)))["ddp"].error == "rank 1: ValueError: no"


def test_results_that_are_no_success_are_kept(tmp_path: Path) -> None:
    def timing_out(_case: Case, _folder: Path) -> LaunchOutcome:
        return LaunchOutcome(timed_out=True)

    run(tmp_path, FakeLauncher(timing_out))
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
