"""The trust strip's facts."""

import msgspec
import pytest

from refshard.records import EndRecord, Run
from refshard.report.origin import command, environment
from refshard.report.trust import Fact, trust
from tests.report.runs import CASES, both, over_network, proof, run, with_record


def facts(made: Run) -> dict[str, Fact]:
    return {fact.label: fact for fact in trust(made)}


def ended(made: Run, end: EndRecord | None) -> Run:
    return msgspec.structs.replace(made, end=end)


def test_a_sound_run_raises_no_doubt() -> None:
    found = facts(run(rounds=3, failed=False))
    assert {label: fact.value for label, fact in found.items()} == {
        "Proof of run": "5 of 5 finished cases",
        "Worst loss parity": "3.1e-07",
        "Bit-identical to DDP": "3 of 4 compared cases",
        "Perturbation by tracing": "at most 1.03 times",
        "Fidelity": "measured",
        "Noise": "± 3.2 % over 3 rounds",
        "Launches ended ok": "15 of 15",
    }
    assert not any(fact.good is False for fact in found.values())


def test_two_rounds_are_doubted() -> None:
    noise = facts(run(failed=False))["Noise"]
    assert noise.good is False
    assert noise.detail.endswith("under 3 rounds, launch-to-launch variation is under-sampled")


def test_a_failed_launch_is_counted() -> None:
    found = facts(run())["Launches ended ok"]
    assert (found.value, found.good) == ("11 of 12", False)


@pytest.mark.parametrize(
    ("interrupted", "detail"),
    [(None, "the run was cut off: it has no closing record"), (True, "the run was interrupted")],
)
def test_a_run_that_did_not_end_by_itself_says_so(interrupted: bool | None, detail: str) -> None:
    made = run(failed=False)
    assert made.end is not None
    end = None if interrupted is None else msgspec.structs.replace(made.end, interrupted=interrupted)
    found = facts(ended(made, end))["Launches ended ok"]
    assert (found.detail, found.good) == (detail, False)


def test_a_case_without_proof_is_doubted() -> None:
    found = facts(with_record(run(failed=False), 0, proof=None))["Proof of run"]
    assert (found.value, found.good) == ("4 of 5 finished cases", False)


def test_losses_that_differ_are_doubted_and_name_the_case() -> None:
    made = run(rounds=1, failed=False)
    metrics = {**made.cases[2].metrics, "loss_parity": 0.02}
    found = facts(with_record(made, 2, metrics=metrics, proof=proof(CASES[2])))["Worst loss parity"]
    assert (found.value, found.good) == ("2.0e-02", False)
    assert found.detail.endswith("(fsdp2, 2 ranks)")


def test_fidelities_are_never_mixed_silently() -> None:
    found = facts(both("simulated"))["Fidelity"]
    assert found.value == "measured and simulated"
    assert found.detail == (
        "measured: real processes, kernels and wire; simulated: every duration is modelled "
        "(cpu with gloo, cpu with gloo on dgx-h100)"
    )


def test_losses_of_what_is_emulated_are_no_doubt_and_no_proof() -> None:
    found = facts(run(rounds=1, failed=False, fidelity="emulated"))
    parity = found["Worst loss parity"]
    assert (parity.value, parity.detail, parity.good) == ("not compared", "compares with nothing", None)
    assert found["Bit-identical to DDP"].value == "not compared"
    assert found["Proof of run"].detail == "units and collectives are what the strategy's plan announced"
    assert facts(both("emulated"))["Worst loss parity"].value == "3.1e-07"


def test_an_empty_run_is_trusted_in_nothing() -> None:
    found = facts(ended(msgspec.structs.replace(run(), cases=()), None))
    assert [found[label].good for label in ("Proof of run", "Worst loss parity", "Fidelity", "Noise")] == [False] * 4


def test_the_environment_as_label_and_value() -> None:
    found = dict(environment(run()))
    assert found["processor"] == "AMD EPYC 7B13, 4 cores (8 logical)"
    assert found["memory"] == "32.0 GiB"
    assert found["matrix multiplication"] == "0.125 TFLOPS measured, fp32, 1 thread"
    assert found["git commit"] == "0123456789abcdef with uncommitted changes"
    assert found["peak for MFU"] == "0.125 TFLOPS per rank: measured GEMM, fp32, 1 thread"


def test_a_network_is_named_wherever_a_reader_looks() -> None:
    made = run(rounds=1, failed=False)
    assert dict(environment(made))["network"] == "none: all ranks on one host"
    words = "2 hosts joined at 2 Gbit/s (network namespaces)"
    found = over_network(made, words)
    assert dict(environment(found))["network"] == words
    assert facts(found)["Fidelity"].detail == f"real processes, kernels and wire (cpu with gloo, {words})"
    assert words not in facts(made)["Fidelity"].detail


def test_the_command_is_quoted_for_a_shell() -> None:
    assert command(run()) == """refshard run suites/quickstart.toml --note 'it'"'"'s <b>bold</b>'"""
