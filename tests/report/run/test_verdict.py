"""The verdict on runs whose numbers are known; goldens show its sentences."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.busy import drift_over, within_launch
from refshard.analysis.evidence import gather
from refshard.records import Load, Run, StepTrace
from refshard.report.run.compare import against
from refshard.report.run.trust import trust
from refshard.report.run.verdict import Finding, findings, notes, overview, unfinished, unranked
from refshard.specs.case import Fidelity
from tests.report.runs import CASES, FAILED, HOSTILE, Made, both, joined, later, quicker, run, with_load, with_record

BY_NAME = {made.strategy: made for made in CASES}
DDP, FSDP2, YAFSDP = (BY_NAME[name] for name in ("ddp", "fsdp2", "refshard-yafsdp"))
PAIR = (DDP, FSDP2)
"""ddp at 50 ms and fsdp2 at 60 ms: 20 %."""


def only(*made: Made, rounds: int = 3) -> Run:
    return run(made, rounds=rounds, failed=False)


def found(made: Run) -> Finding:
    (finding,) = findings(gather(made))
    return finding


def test_failed_cases_and_references_do_not_compete() -> None:
    """fsdp2-tuned took 41 ms in the rounds that ended ok, and an unsharded rank is faster than all."""
    finding = found(run((replace(CASES[0], step_time=0.001, peak_mib=1), *CASES[1:])))
    assert finding.lead == "Use refshard-yafsdp: 60.0 MiB (20 %) less memory than fsdp2, which takes 50.0 % longer."
    assert finding.margin == (
        "40.0 ms per step and 240 MiB per rank (peak), measured in 3 launches. Next: refshard-fsdp takes 48.0 ms, "
        "20.0 % longer (95 % interval 20.0 to 20.0 %, paired by round). Least memory, within 3 %: refshard-yafsdp "
        "(240 MiB, peak); next refshard-fsdp, 16.7 % more."
    )
    assert FAILED not in finding.summary
    assert unranked(gather(run())) == [
        f"fsdp2-tuned, 2 ranks: failed in 1 of 3 rounds (RuntimeError: mat1 and mat2 shapes differ {HOSTILE})."
    ]


def test_on_one_rank_the_reference_does_not_compete_either() -> None:
    alone = [replace(made, world_size=1) for made in (DDP, BY_NAME["refshard-fsdp"])]
    assert found(only(replace(CASES[0], step_time=0.001), *alone)).lead.startswith("Use refshard-fsdp: 160 MiB")


ALIKE = [replace(made, step_time=0.04 + 0.0001 * place, peak_mib=100) for place, made in enumerate(CASES[1:])]


@pytest.mark.parametrize(
    ("made", "lead", "margin"),
    [
        (only(replace(YAFSDP, peak_mib=500), *CASES[1:4]),
         "Use refshard-yafsdp: fsdp2 takes 50.0 % longer, in 200 MiB (40 %) less memory.",
         "Least memory, within 3 %: refshard-fsdp (280 MiB, peak); next fsdp2, 7.1 % more."),
        (run(ALIKE, rounds=1, failed=False, fidelity="dryrun"),
         "Use ddp: no other is clearly faster or needs clearly less memory.",
         "Ties with ddp (40.0 ms per step; within 3 %): fsdp2, refshard-fsdp and refshard-yafsdp."),
        (run(PAIR, rounds=1, failed=False, fidelity="dryrun"),
         "Use ddp: fsdp2 takes 20.0 % longer, in 140 MiB (32 %) less memory.",
         "by dry run. Next: fsdp2 takes 60.0 ms, 20.0 % longer. Least memory"),
        (run((DDP, replace(FSDP2, step_time=0.0505)), rounds=1, failed=False, fidelity="dryrun"),
         "Use fsdp2: 140 MiB (32 %) less memory than ddp at the same speed.", "50.5 ms per step and 300 MiB"),
        (only(DDP, replace(FSDP2, step_time=0.0502)),
         "Use fsdp2: 140 MiB (32 %) less memory than ddp; their step times tie.",
         "Ties with ddp (50.0 ms per step; ratio and 95 % interval, paired by round): fsdp2 1.004 (1.004 to 1.004)."),
        (only(DDP, replace(FSDP2, step_time=0.125)), "Use ddp: fsdp2 takes 2.5 times as long, in 140 MiB (32 %) less",
         "Next: fsdp2 takes 125 ms, 2.5 times as long (95 % interval 2.500 to 2.500, paired by round)."),
        (only(DDP, replace(FSDP2, peak_mib=440.9)), "Use ddp: fsdp2 takes 20.0 % longer, in as much memory.",
         "Least memory, within 3 %: ddp and fsdp2 (440 MiB, peak)."),
        (run((DDP,)), "Use ddp: no other strategy here finished.", "50.0 ms per step and 440 MiB per rank (peak), mea"),
        (only(CASES[0]), "Nothing to compare: single ran alone.", "80.0 ms per step"),
        (only(*PAIR, rounds=1), "No verdict: n = 1: no interval (3 launches of each give one).",
         "Not ranked: ddp 50.0 ms and fsdp2 60.0 ms per step. Least memory, within 3 %: fsdp2"),
        (only(*CASES[1:], rounds=1), "No verdict: n = 1", "Not ranked: 4 strategies, 40.0 to 60.0 ms per step."),
    ],
)  # fmt: skip
def test_sentences(made: Run, lead: str, margin: str) -> None:
    finding = found(made)
    assert finding.lead.startswith(lead)
    assert margin in finding.margin


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("fidelity", ["measured", "emulated"])
def test_under_three_launches_nothing_is_ranked_by_time(rounds: int, fidelity: Fidelity) -> None:
    """However far apart: the same code launched three times in a quarter of an hour differed by 82 %."""
    bare = [replace(made, peak_mib=100) for made in CASES[:3]]
    finding = found(run(bare, rounds=rounds, failed=False, fidelity=fidelity))
    assert finding.lead == f"No verdict: n = {rounds}: no interval (3 launches of each give one)."
    assert finding.margin.startswith("Not ranked: ddp 5")
    assert (finding.ranking.fastest, finding.decides, finding.why) == ((), False, "")


def test_ranks_only_cases_with_three_launches() -> None:
    for step_time, says in ((0.055, "Use ddp: fsdp2 takes 20.0 % longer"), (0.048, "No verdict: n = 2: no interval")):
        made = only(*CASES[1:3], replace(CASES[3], step_time=step_time))
        finding = found(msgspec.structs.replace(made, launches=made.launches[:-1]))
        assert finding.lead.startswith(says)  # no other may be used while one seems faster
        assert "Not ranked by time (n = 2: no interval): refshard-fsdp " in finding.margin
    made = only(*PAIR)
    one = found(msgspec.structs.replace(made, launches=made.launches[:-1]))
    assert one.lead.startswith("No verdict: n = 2: no interval")
    assert one.margin.startswith("Not ranked: ddp 50.0 ms and fsdp2 59.7 ms per step.")


def timed(made: Run, strategy: str, *factors: float) -> Run:
    """The run with the times of a strategy changed by a factor in each round."""
    for place, record in enumerate(made.launches):
        if record.case.job.strategy == strategy:
            times = tuple(tuple(factors[record.round] * t for t in rank) for rank in record.step_times_s)
            made = with_record(made, place, step_times_s=times)
    return made


def test_strategies_within_the_noise_tie() -> None:
    """Rounds favour one, then the other; a third that is 20 % slower is the next."""
    made = only(replace(DDP, step_time=0.0400), replace(FSDP2, step_time=0.0401), BY_NAME["refshard-fsdp"])
    finding = found(timed(made, "fsdp2", 1.02, 1.0, 0.98))
    assert finding.lead == "Use fsdp2: 140 MiB (32 %) less memory than ddp; their step times tie."
    assert (
        "Ties with ddp (40.0 ms per step; ratio and 95 % interval, paired by round): fsdp2 1.002 (0.9" in finding.margin
    )
    assert "). Next: refshard-fsdp takes 48.0 ms, 20.0 % longer" in finding.margin


def test_the_ratio_within_rounds_decides_over_the_medians() -> None:
    """The median of ddp is smaller, but in two rounds of three, on a slower machine, fsdp2 is 10 % faster."""
    made = timed(timed(only(*PAIR), "ddp", 1, 2, 0.2), "fsdp2", 0.75, 1.5, 1)
    assert [case.strategy for case in found(made).ranking.fastest] == ["fsdp2", "ddp"]


def test_nothing_finished() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, state="oom", error="rank 0: out of memory")
    assert found(made).summary == "No verdict: no strategy finished."
    assert unranked(gather(made)) == ["ddp, 2 ranks: out of memory (rank 0: out of memory)."]
    (sentence,) = unranked(gather(with_record(run(), -1, error="x" * 500)))
    assert sentence.endswith(f"({'x' * 117}...).")


def test_every_world_size_above_one_is_a_comparison() -> None:
    made = only(*CASES, *(replace(case, world_size=4, step_time=case.step_time / 2) for case in PAIR))
    assert [(one.title.rpartition(", ")[2], one.lead.partition(":")[0]) for one in findings(gather(made))] == [
        ("2 ranks", "Use refshard-yafsdp"), ("4 ranks", "Use ddp"),
    ]  # fmt: skip


def why(compute: float, exposed: float, idle: float) -> str:
    """The reason if fsdp2, with these times in s, loses to ddp with 40, 9 and 2 ms."""
    return found(only(DDP, replace(FSDP2, compute=compute, exposed=exposed, idle=idle))).why


def test_the_reason_is_most_of_the_difference_or_its_largest_part() -> None:
    assert why(0.042, 0.016, 0.002).startswith("In the traces, most of the difference is exposed communication")
    assert why(0.045, 0.015, 0.007) == (
        "In the traces, the largest part of the difference is exposed communication: 15.0 ms per step in fsdp2, 9.00 "
        "ms in ddp."
    )
    assert why(0.020, 0.010, 0.002) == "", "the traced pass does not show the loss"


@pytest.mark.parametrize(("theirs", "given"), [((3, 4), True), ((2, 4), False)])
def test_no_reason_is_given_if_the_traced_steps_of_both_overlap(theirs: Sequence[int], given: bool) -> None:
    def traced(exposed: Sequence[int]) -> tuple[StepTrace, ...]:
        return tuple(
            StepTrace(rank=0, step=s, span_ns=1, compute_ns=1, comm_ns=9, exposed_ns=ns, idle_ns=0)
            for s, ns in enumerate(exposed)
        )

    made = with_record(with_record(only(*PAIR), 0, steps=traced((1, 2))), 1, steps=traced(theirs))
    assert bool(found(made).why) is given


def test_a_run_that_did_not_end_by_itself() -> None:
    made = only(*PAIR)
    assert made.end is not None
    for end, reason in (
        (None, "cut off, or is still under way"), (msgspec.structs.replace(made.end, interrupted=True), "interrupted"),
    ):  # fmt: skip
        stopped = gather(msgspec.structs.replace(made, end=end))
        assert unfinished(stopped) == [f"Not finished: 6 of 6 launches are done; the run was {reason}."]
    assert unfinished(gather(made)) == []
    assert unfinished(gather(msgspec.structs.replace(made, launches=()))) == ["Nothing was launched."]


def test_notes_say_what_was_not_measured_and_the_first_warning() -> None:
    assert "Not measured, but emulated on dgx-h100: one real rank; the other ranks are modelled." in notes(
        gather(run(failed=False, fidelity="emulated"))
    )
    titles = [finding.title.partition("tokens, ")[2] for finding in findings(gather(both("emulated")))]
    assert titles == ["measured, 2 ranks", "emulated on dgx-h100, 2 ranks"]
    made = with_record(with_record(only(*CASES), 1, warnings=("it\x1b[0m waited",)), 2, warnings=("so did it",))
    assert notes(gather(made)) == ["Caution: ddp, 2 ranks: it waited; 1 more case has warnings: see --json."]


def test_cases_of_several_runs_are_doubted_and_not_paired() -> None:
    """Paired, the ratio of two series of equal drift has no width; of two runs it has that of the drift."""
    (apart,) = findings(gather(only(DDP), later(only(FSDP2), "other")))
    assert apart.caveats[0].startswith("the cases come from several runs")
    assert "fsdp2 takes 60.0 ms, 20.0 % longer (95 % interval 14.8 to 25.4 %" in apart.margin
    together = found(only(*PAIR))
    assert together.caveats == ()
    assert "fsdp2 takes 60.0 ms, 20.0 % longer (95 % interval 20.0 to 20.0 %, paired by round)" in together.margin


def test_many_comparisons_are_summed_up() -> None:
    """World sizes, in one of which two strategies tie: there memory decides."""
    every = [
        only(*(replace(made, world_size=size, step_time=0.048 if size == 4 else made.step_time) for made in CASES[3:]))
        for size in (2, 4, 8)
    ]
    ranked = findings(gather(joined(*every)))
    assert [len(one.ranking.fastest) for one in ranked] == [1, 2, 1]
    assert overview(ranked) == ()
    assert overview((*ranked, ranked[0])) == (
        "Use refshard-yafsdp in 4 of 4 comparisons. Least memory, within 3 %: refshard-yafsdp in 4.",
    )
    (undecided,) = findings(gather(only(*PAIR, rounds=1)))
    assert overview((*ranked, undecided))[0].startswith("Use refshard-yafsdp in 3 of 4 comparisons; no verdict in 1. ")
    assert overview((undecided,) * 4)[0].startswith("No verdict in any of 4 comparisons. ")


def load(before: float = 0.05, after: float = 0.05, others: float | None = 0.0) -> Load:
    return Load(probe_before_s=before, probe_after_s=after, other_cores=others, cores=2)


@pytest.mark.parametrize(
    ("loads", "why"),
    [
        ({}, ""),
        ({"fsdp2": load(0.05, 0.055)}, ""),
        ({"fsdp2": load(0.05, 0.07)}, "the machine's speed drifted by 40.0 %, more than the difference of 20.0 %."),
        ({"fsdp2": load(0.065, 0.065)}, "the machine's speed drifted by 30.0 %, more than the difference of 20.0 %."),
        ({"ddp": load(others=0.6)}, "other processes took 30.0 % more of the machine during one of the two, more than"),
    ],
)
def test_a_difference_within_the_machines_drift_is_not_decided(loads: dict[str, Load], why: str) -> None:
    """Of ddp, 20 % faster, and fsdp2, which needs less memory, ddp is to be used; with drift there is no verdict."""
    finding = found(with_load(only(*PAIR), loads))
    start = "No verdict: ddp (50.0 ms, 440 MiB) or fsdp2 (60.0 ms, 300 MiB); fsdp2 takes 20.0 % longer (95 % interval"
    assert finding.lead.startswith(start if why else "Use ddp: ")
    assert why in finding.lead
    assert finding.decides is not bool(why)
    lean = found(with_load(only(replace(DDP, peak_mib=200), FSDP2), loads))
    assert lean.lead.startswith("Use ddp: 100 MiB (33 %) less memory than fsdp2"), "whichever is faster"
    assert ("; which one is faster is not decided." in lean.lead) is bool(why)


def test_drifts_are_those_of_common_rounds() -> None:
    """Two launches of ddp without a partner in their rounds do not count between the sides."""
    made = with_load(only(*PAIR), {})
    alone = [msgspec.structs.replace(made.launches[place], load=load(5.0, 5.0)) for place in (2, 4)]
    first, second = gather(msgspec.structs.replace(made, launches=(*made.launches[:2], *alone))).cases
    assert drift_over(first, second, 0.0) is None


def test_a_comparison_with_a_baseline_and_the_facts_name_the_drift() -> None:
    before = with_load(only(*PAIR), {})
    now = later(with_load(quicker(before, 1.1), {"ddp": load(0.08, 0.08)}), "now")
    assert against(gather(now), gather(before)).sentences[1:] == [
        "2 matching cases: 1 too noisy to tell.",
        "ddp, 2 ranks 10.0 % longer, not decided: the machine's speed drifted by 60.0 %, more than the difference of "
        "10.0 %.",
    ]
    found = {fact.label: fact for fact in trust(gather(with_load(only(*PAIR), {"ddp": load(0.05, 0.06, 0.4)})))}
    assert found["Machine drift"].value == "up to 20.0 %"
    assert "other processes used at most 0.4 of 2 cores" in found["Machine drift"].detail
    assert within_launch(gather(only(*PAIR)).cases[0]) is None
