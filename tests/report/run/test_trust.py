"""The facts about how far to trust a run."""

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.analysis.rehearsal import CaseNoise, Noise
from refshard.records import EndRecord, Run
from refshard.report.blocks import Fact
from refshard.report.run.origin import case_command, command, environment
from refshard.report.run.trust import trust
from tests.report.runs import CASES, both, over_network, proof, run, with_record


def facts(made: Run) -> dict[str, Fact]:
    return {fact.label: fact for fact in trust(gather(made))}


def ended(made: Run, end: EndRecord | None) -> Run:
    return msgspec.structs.replace(made, end=end)


def test_a_sound_run_raises_no_doubt() -> None:
    found = facts(run(rounds=3, failed=False))
    assert {label: fact.value for label, fact in found.items()} == {
        "Proof of run": "5 of 5 finished cases",
        "Loss parity": "3.1e-07",
        "Bit-identical to DDP": "3 of 4 compared cases",
        "Slow-down by tracing": "up to 1.03 times",
        "Fidelity": "measured",
        "Noise": "± 3.2 % over 3 rounds",
        "Machine drift": "not recorded",
        "Smallest visible difference": "± 0.0 %",
        "Same code against itself": "not measured",
        "Launches that ended ok": "15 of 15",
    }
    assert not any(fact.style == "doubtful" for fact in found.values())


def test_two_rounds_tell_no_noise() -> None:
    noise = facts(run(rounds=2, failed=False))["Noise"]
    assert (noise.value, noise.detail, noise.style) == (
        "unknown", "n = 2: no interval; 3 rounds give one", "doubtful",
    )  # fmt: skip


def test_a_failed_launch_is_counted() -> None:
    found = facts(run())["Launches that ended ok"]
    assert (found.value, found.style) == ("17 of 18", "doubtful")


@pytest.mark.parametrize(
    ("interrupted", "detail"),
    [(None, "the run was cut off: it has no closing record"), (True, "the run was interrupted")],
)
def test_a_run_that_did_not_end_by_itself_says_so(interrupted: bool | None, detail: str) -> None:
    made = run(failed=False)
    assert made.end is not None
    end = None if interrupted is None else msgspec.structs.replace(made.end, interrupted=interrupted)
    found = facts(ended(made, end))["Launches that ended ok"]
    assert (found.detail, found.style) == (detail, "doubtful")


def test_a_case_without_proof_is_doubted() -> None:
    found = facts(with_record(run(failed=False), 0, proof=None))["Proof of run"]
    assert (found.value, found.style) == ("4 of 5 finished cases", "doubtful")


def test_losses_that_differ_are_doubted_and_name_the_case() -> None:
    made = run(rounds=1, failed=False)
    metrics = {**made.launches[2].metrics, "loss_parity": 0.02}
    found = facts(with_record(made, 2, metrics=metrics, proof=proof(CASES[2])))["Loss parity"]
    assert (found.value, found.style) == ("2.0e-02", "doubtful")
    assert found.detail.endswith("(fsdp2, 2 ranks; the limit is 1e-05)")


def test_fidelities_are_never_mixed_silently() -> None:
    found = facts(both("simulated"))["Fidelity"]
    assert found.value == "measured and simulated"
    assert found.detail == (
        "measured: real processes, kernels and network; simulated: all times are modelled "
        "(cpu with gloo, cpu with gloo on dgx-h100)"
    )


def test_losses_of_what_is_emulated_are_no_doubt_and_no_proof() -> None:
    found = facts(run(rounds=1, failed=False, fidelity="emulated"))
    parity = found["Loss parity"]
    assert (parity.value, parity.detail, parity.style) == ("not compared", "compares with nothing", "plain")
    assert found["Bit-identical to DDP"].value == "not compared"
    assert found["Proof of run"].detail == "units and collectives match the strategy's plan"
    assert facts(both("emulated"))["Loss parity"].value == "3.1e-07"


def test_an_empty_run_is_trusted_in_nothing() -> None:
    found = facts(ended(msgspec.structs.replace(run(), launches=()), None))
    assert {found[label].style for label in ("Proof of run", "Loss parity", "Fidelity", "Noise")} == {"doubtful"}


def test_a_network_is_named_wherever_a_reader_looks() -> None:
    made = run(rounds=1, failed=False)
    assert dict(environment(made))["network"] == "none: all ranks on one host"
    words = "2 hosts joined at 2 Gbit/s (network namespaces)"
    found = over_network(made, words)
    assert dict(environment(found))["network"] == words
    assert facts(found)["Fidelity"].detail == f"real processes, kernels and network (cpu with gloo, {words})"
    assert words not in facts(made)["Fidelity"].detail


def test_the_command_is_quoted_for_a_shell() -> None:
    assert command(run()) == """refshard run suites/quickstart.toml --note 'it'"'"'s <b>bold</b>'"""


def test_the_smallest_visible_difference_is_as_wide_as_the_ratios() -> None:
    """Paired by round: one case takes 1 % more, then less, against the others."""
    made = run(CASES[1:3], failed=False)
    for place, factor in ((0, 1.01), (4, 0.99)):
        times = tuple(tuple(factor * time for time in rank) for rank in made.launches[place].step_times_s)
        made = with_record(made, place, step_times_s=times)
    visible = facts(made)["Smallest visible difference"]
    width = float(visible.value.removeprefix("± ").removesuffix(" %"))
    assert 1.0 < width < 5.0
    assert facts(run(rounds=2, failed=False))["Smallest visible difference"].value == "unknown"
    alone = facts(run(CASES[:2], failed=False))["Smallest visible difference"]
    assert (alone.value, alone.detail.rpartition("; ")[2]) == ("unknown", "no two cases have an interval")


def test_simulated_steps_are_no_noise() -> None:
    measured, simulated = run(rounds=3, failed=False), run(rounds=1, failed=False, fidelity="simulated")
    steps = [msgspec.structs.replace(record, step_times_s=((0.04,),)) for record in simulated.launches]
    both_ = msgspec.structs.replace(measured, launches=(*measured.launches, *steps))
    assert facts(both_)["Noise"] == facts(measured)["Noise"]
    alone = facts(msgspec.structs.replace(simulated, launches=tuple(steps)))["Noise"]
    assert (alone.value, alone.style) == ("none", "plain")


def test_what_gates_on_this_machine_are_worth_is_told_if_it_was_measured() -> None:
    case = CaseNoise(
        rounds=150, ratio=1.0, low=0.97, high=1.03, spread=0.1, false_alarms=1, inconclusive=600, planted=0.05,
        tried=250, found=10, smallest_visible=0.118,
    )  # fmt: skip
    other = msgspec.structs.replace(case, smallest_visible=0.164)
    noise = Noise(launches=300, gates=1000, failing_gates=8, cases={"a": case, "b": other})
    (told,) = [fact for fact in trust(gather(run()), noise) if fact.label == "Same code against itself"]
    assert told.value == "8 of 1,000 gates failed"
    assert told.detail.endswith(
        "over 300 launches; a gate here detects slow-downs from 11.8 % to 16.4 %, depending on the case"
    )


def test_each_case_has_its_command() -> None:
    every = gather(run()).cases
    assert case_command(every[1], every) == (
        """refshard run suites/quickstart.toml --note 'it'"'"'s <b>bold</b>' --only ddp-w2-llama-mini-b8x256"""
    )


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        (
            ("/x/bin/refshard", "run", "a.toml", "--out", "there", "--oversubscribe"),
            "refshard run a.toml --oversubscribe",
        ),
        (("refshard", "run", "a.toml", "--out=there", "--only", "b"), "refshard run a.toml"),
        (("refshard", "run", "a.toml", "-othere", "--launcher", "slurm"), "refshard run a.toml --launcher slurm"),
        (("refshard", "run", "a.toml", "-o", "there"), "refshard run a.toml"),
        (("refshard", "run", "--resume", "runs/latest"), "refshard run suites/quickstart.toml"),
        (("refshard", "gate"), "refshard run suites/quickstart.toml"),
        ((), "refshard run suites/quickstart.toml"),
    ],
)
def test_a_command_leaves_out_what_belongs_to_one_run(given: tuple[str, ...], begins: str) -> None:
    made = run()
    env = msgspec.structs.replace(made.header.environment, argv=given)
    every = gather(msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, environment=env))).cases
    assert case_command(every[1], every) == f"{begins} --only ddp-w2-llama-mini-b8x256"


def test_cases_of_one_name_go_by_their_hashes() -> None:
    made = run()
    seeded = made.launches[1].case.changed(seed=1)
    made = msgspec.structs.replace(
        made, launches=(*made.launches, msgspec.structs.replace(made.launches[1], case=seeded))
    )
    every = gather(made).cases
    ends = {case_command(case, every).rpartition(" ")[2] for case in every if case.strategy == "ddp"}
    assert ends == {seeded.hash, made.launches[1].case.hash}
