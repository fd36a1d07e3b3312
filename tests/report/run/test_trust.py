"""The facts about how far to trust a run, and the commands that reproduce it."""

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.analysis.rehearsal import CaseNoise, Noise
from refshard.records import Run
from refshard.report.blocks import Fact
from refshard.report.run.origin import case_command, environment
from refshard.report.run.trust import in_short, trust
from tests.report.runs import CASES, both, joined, over_network, proof, run, with_record, with_spec


def facts(made: Run) -> dict[str, Fact]:
    return {fact.label: fact for fact in trust(gather(made))}


SOUND = run(rounds=3, failed=False)
EMPTY = msgspec.structs.replace(run(), launches=(), end=None)


def test_facts_that_say_nothing_are_left_out_of_the_line() -> None:
    assert [fact.label for fact in in_short(list(facts(SOUND).values()))] == [
        "Fidelity", "Proof of run", "Loss parity", "Noise",
    ]  # fmt: skip
    assert not any(fact.style == "doubtful" for fact in facts(SOUND).values())


def interrupted(made: Run) -> Run:
    assert made.end is not None
    return msgspec.structs.replace(made, end=msgspec.structs.replace(made.end, interrupted=True))


@pytest.mark.parametrize(
    ("made", "label", "value", "detail"),
    [
        (run(rounds=2, failed=False), "Noise", "unknown", "n = 2: no interval; 3 rounds give one"),
        (run(), "Launches that ended ok", "17 of 18", "the case states list the others"),
        (msgspec.structs.replace(SOUND, end=None), "Launches that ended ok", "15 of 15",
         "the run was cut off: it has no closing record"),
        (interrupted(SOUND), "Launches that ended ok", "15 of 15", "the run was interrupted"),
        (with_record(SOUND, 0, proof=None), "Proof of run", "4 of 5 finished cases", "match the strategy's plan"),
        (with_record(run(rounds=1, failed=False), 2, proof=proof(CASES[2]),
                     metrics={**SOUND.launches[2].metrics, "loss_parity": 0.02}),
         "Loss parity", "2.0e-02", "(fsdp2, 2 ranks; the limit is 1e-05)"),
        *((EMPTY, label, value, "") for label, value in
          (("Proof of run", "0 of 0 finished cases"), ("Loss parity", "unknown"), ("Fidelity", "none"))),
    ],
)  # fmt: skip
def test_doubtful_facts_are_marked(made: Run, label: str, value: str, detail: str) -> None:
    fact = facts(made)[label]
    assert (fact.value, fact.style) == (value, "doubtful")
    assert fact.detail.endswith(detail)


def test_fidelities_are_never_mixed_silently() -> None:
    found = facts(both("simulated"))["Fidelity"]
    assert found.value == "measured and simulated"
    assert found.detail == (
        "measured: real processes, kernels and network; simulated: all times are modelled "
        "(cpu with gloo, cpu with gloo on dgx-h100)"
    )


def test_losses_of_emulated_cases_are_no_doubt_and_no_proof() -> None:
    found = facts(run(rounds=1, failed=False, fidelity="emulated"))
    parity = found["Loss parity"]
    assert (parity.value, parity.detail, parity.style) == ("not compared", "compares with nothing", "plain")
    assert found["Bit-identical to DDP"].value == "not compared"
    assert found["Proof of run"].detail == "units and collectives match the strategy's plan"
    assert facts(both("emulated"))["Loss parity"].value == "3.1e-07"


def test_a_network_is_named_with_the_machine_and_the_fidelity() -> None:
    text = "2 hosts joined at 2 Gbit/s (network namespaces)"
    assert environment(SOUND)["network"] == "none: all ranks on one host"
    assert environment(over_network(SOUND, text))["network"] == text
    assert facts(over_network(SOUND, text))["Fidelity"].detail.endswith(f"(cpu with gloo, {text})")


def test_the_smallest_visible_difference_is_as_wide_as_the_ratios() -> None:
    """Paired by round: one case takes 1 % more, then less, against the others."""
    made = run(CASES[1:3], failed=False)
    for place, factor in ((0, 1.01), (4, 0.99)):
        times = tuple(tuple(factor * time for time in rank) for rank in made.launches[place].step_times_s)
        made = with_record(made, place, step_times_s=times)
    visible = facts(made)["Smallest visible difference"]
    assert 1.0 < float(visible.value.removeprefix("± ").removesuffix(" %")) < 5.0
    for few in (run(rounds=2, failed=False), run(CASES[:2], failed=False)):
        found = facts(few)["Smallest visible difference"]
        assert (found.value, found.detail.rpartition("; ")[2]) == ("unknown", "no two cases have an interval")


def test_calculated_steps_are_no_noise() -> None:
    simulated = run(rounds=1, failed=False, fidelity="simulated")
    for place in range(len(simulated.launches)):
        simulated = with_record(simulated, place, step_times_s=((0.04,),))
    assert facts(joined(SOUND, simulated))["Noise"] == facts(SOUND)["Noise"]
    assert (facts(simulated)["Noise"].value, facts(simulated)["Noise"].style) == ("none", "plain")


def test_the_machines_own_noise_is_a_fact_if_it_was_measured() -> None:
    case = CaseNoise(
        rounds=150, ratio=1.0, low=0.97, high=1.03, spread=0.1, false_alarms=1, inconclusive=600, planted=0.05,
        tried=250, found=10, smallest_visible=0.118,
    )  # fmt: skip
    other = msgspec.structs.replace(case, smallest_visible=0.164)
    noise = Noise(launches=300, gates=1000, failing_gates=8, cases={"a": case, "b": other})
    (fact,) = [fact for fact in trust(gather(run()), noise) if fact.label == "Same code against itself"]
    assert fact.value == "8 of 1,000 gates failed"
    assert "detects slow-downs from 11.8 % to 16.4 %" in fact.detail


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        (("refshard", "run", "a.toml", "--note", "it's <b>"), """refshard run a.toml --note 'it'"'"'s <b>'"""),
        (("/x/bin/refshard", "run", "a.toml", "--out", "b", "--oversubscribe"), "refshard run a.toml --oversubscribe"),
        (("refshard", "run", "a.toml", "--out=there", "--only", "b"), "refshard run a.toml"),
        (("refshard", "run", "a.toml", "-othere", "--launcher", "slurm"), "refshard run a.toml --launcher slurm"),
        (("refshard", "run", "a.toml", "-o", "there"), "refshard run a.toml"),
        (("refshard", "run", "--resume", "runs/latest"), "refshard run suites/quickstart.toml"),
        (("refshard", "gate"), "refshard run suites/quickstart.toml"),
        ((), "refshard run suites/quickstart.toml"),
    ],
)
def test_the_command_of_a_case_leaves_out_options_of_one_run(given: tuple[str, ...], begins: str) -> None:
    made = run()
    env = msgspec.structs.replace(made.header.environment, argv=given)
    every = gather(msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, environment=env))).cases
    assert case_command(every[1], every) == f"{begins} --only ddp-w2-llama-mini-b8x256"


def test_the_command_of_cases_of_one_name_has_their_hashes() -> None:
    every = gather(joined(run(CASES[1:2]), with_spec(run(CASES[1:2]), seed=1))).cases
    ddp = [case for case in every if case.strategy == "ddp"]
    assert {case_command(case, every).rpartition(" ")[2] for case in ddp} == {case.spec.hash for case in ddp}
