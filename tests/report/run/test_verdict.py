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
    assert finding.lead.startswith("refshard-yafsdp is fastest (40.0 ms per step) and needs the least memory (240 MiB")
    assert finding.margin.startswith("Next: refshard-fsdp takes 48.0 ms, 20.0 % longer, paired by round")
    assert finding.margin.endswith("Next in memory: refshard-fsdp with 280 MiB, 16.7 % more.")
    assert FAILED not in finding.summary
    assert unranked(gather(run())) == [
        f"fsdp2-tuned, 2 ranks: failed in 1 of 3 rounds (RuntimeError: mat1 and mat2 shapes differ {HOSTILE})."
    ]


def test_on_one_rank_the_reference_does_not_compete_either() -> None:
    alone = [replace(made, world_size=1) for made in (DDP, BY_NAME["refshard-fsdp"])]
    assert found(only(replace(CASES[0], step_time=0.001), *alone)).lead.startswith("refshard-fsdp is fastest (48.0 ms")


ALIKE = [replace(made, step_time=0.04 + 0.0001 * place, peak_mib=100) for place, made in enumerate(CASES[1:])]


@pytest.mark.parametrize(
    ("made", "lead", "margin"),
    [
        (only(replace(YAFSDP, peak_mib=500), *CASES[1:4]), "(40.0 ms per step); refshard-fsdp needs the least", "Next"),
        (run(ALIKE, rounds=1, failed=False, fidelity="dryrun"),
         "ddp, fsdp2, refshard-fsdp and refshard-yafsdp tie for fastest (40.0 to 40.3 ms per step) and need the least",
         "Differences under 3 % are within the model's error."),
        (run(PAIR, rounds=1, failed=False, fidelity="dryrun"), "ddp is fastest (50.0 ms per step); fsdp2 needs",
         "Next: fsdp2 takes 60.0 ms, 20.0 % longer. Next in memory: ddp"),
        (only(DDP, replace(FSDP2, step_time=0.0502)), "ddp is fastest",
         "0.4 % longer, paired by round (95 % interval 0.4 to 0.4 %; significant, but under 1 %)."),
        (only(DDP, replace(FSDP2, step_time=0.125)), "ddp is fastest",
         "takes 125 ms, 2.5 times as long, paired by round (95 % interval 2.500 to 2.500; significant)."),
        (only(DDP, replace(FSDP2, peak_mib=440.9)), "; ddp and fsdp2 need the least memory (440 MiB per rank, peak).",
         "Next: fsdp2 takes"),
        (only(CASES[0], DDP), "ddp is the only strategy here that finished: 50.0 ms per step.", ""),
        (only(CASES[0]), "single is the only strategy here that finished: 80.0 ms per step.", ""),
        (only(*PAIR, rounds=1), "Not ranked by time (n = 1: no interval): ddp 50.0 ms and fsdp2 60.0 ms per step. fsd",
         "Next in memory"),
        (only(*CASES[1:], rounds=1), "(n = 1: no interval): 4 strategies, 40.0 to 60.0 ms per step. refshard-yaf", ""),
    ],
)  # fmt: skip
def test_sentences(made: Run, lead: str, margin: str) -> None:
    finding = found(made)
    assert lead in finding.lead
    assert margin in finding.margin


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("fidelity", ["measured", "emulated"])
def test_under_three_launches_nothing_is_ranked_by_time(rounds: int, fidelity: Fidelity) -> None:
    """However far apart: the same code launched three times in a quarter of an hour differed by 82 %."""
    bare = [replace(made, peak_mib=100) for made in CASES[:3]]
    finding = found(run(bare, rounds=rounds, failed=False, fidelity=fidelity))
    assert finding.lead.startswith(f"Not ranked by time (n = {rounds}: no interval): ddp 50.0 ms and fsdp2 60.0 ms")
    assert (finding.ranking.fastest, finding.margin, finding.why) == ((), "", "")


def test_ranks_only_cases_with_three_launches() -> None:
    made = only(*CASES[1:4])
    finding = found(msgspec.structs.replace(made, launches=made.launches[:-1]))
    assert finding.lead.startswith("ddp is fastest (50.0 ms per step)")
    assert "Not ranked by time (n = 2: no interval): refshard-fsdp 47.8 ms per step." in finding.margin
    made = only(*PAIR)
    one = found(msgspec.structs.replace(made, launches=made.launches[:-1]))
    assert one.lead.startswith("Not ranked by time (n = 2: no interval): ddp 50.0 ms and fsdp2 59.7 ms per step.")


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
    assert finding.lead.startswith("ddp and fsdp2 tie for fastest (40.0 to 40.1 ms per step)")
    assert finding.margin.startswith("fsdp2 takes 1.002 times as long as ddp, paired by round (95 % interval 0.9")
    assert "which includes 1; more rounds would narrow it). Next: refshard-fsdp takes 48.0 ms" in finding.margin


def test_the_ratio_within_rounds_decides_over_the_medians() -> None:
    """The median of ddp is smaller, but in two rounds of three, on a slower machine, fsdp2 is 10 % faster."""
    made = timed(timed(only(*PAIR), "ddp", 1, 2, 0.2), "fsdp2", 0.75, 1.5, 1)
    assert found(made).lead.startswith("fsdp2 and ddp tie for fastest")


def test_nothing_finished() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, state="oom", error="rank 0: out of memory")
    assert found(made).summary == "No strategy finished, so there is nothing to rank."
    assert unranked(gather(made)) == ["ddp, 2 ranks: out of memory (rank 0: out of memory)."]
    (sentence,) = unranked(gather(with_record(run(), -1, error="x" * 500)))
    assert sentence.endswith(f"({'x' * 117}...).")


def test_every_world_size_above_one_is_a_comparison() -> None:
    made = only(*CASES, *(replace(case, world_size=4, step_time=case.step_time / 2) for case in PAIR))
    assert [(one.title.rpartition(", ")[2], one.lead.partition(" is")[0]) for one in findings(gather(made))] == [
        ("2 ranks", "refshard-yafsdp"), ("4 ranks", "ddp"),
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
    assert "fsdp2 takes 60.0 ms, 20.0 % longer, paired by round (95 % interval 20.0 to 20.0 %" in together.margin


def test_many_comparisons_are_summed_up() -> None:
    """World sizes, in one of which two strategies tie."""
    every = [
        only(*(replace(made, world_size=size, step_time=0.048 if size == 4 else made.step_time) for made in CASES[3:]))
        for size in (2, 4, 8)
    ]
    ranked = findings(gather(joined(*every)))
    assert [len(one.ranking.fastest) for one in ranked] == [1, 2, 1]
    assert overview(ranked) == ()
    assert overview((*ranked, ranked[0])) == (
        "refshard-yafsdp was fastest in 3 of 4 comparisons; 1 was a tie. Lowest memory: refshard-yafsdp in 4.",
    )
    assert overview((ranked[1],) * 4)[0].startswith("All 4 comparisons are ties for the fastest strategy. ")


def load(before: float = 0.05, after: float = 0.05, others: float | None = 0.0) -> Load:
    return Load(probe_before_s=before, probe_after_s=after, other_cores=others, cores=2)


EVEN = (DDP, replace(FSDP2, step_time=DDP.step_time))


@pytest.mark.parametrize(
    ("made", "loads", "text"),
    [
        (only(*PAIR), {}, ""),
        (only(*PAIR), {"fsdp2": load(0.05, 0.055)}, ""),
        (only(*PAIR), {"fsdp2": load(0.05, 0.07)}, "went from 50.0 ms to 70.0 ms within a launch of fsdp2, 2 ranks "
         "(40.0 %). That is more than the difference in step time (20.0 %)."),
        (only(*PAIR), {"fsdp2": load(0.065, 0.065)}, "from 50.0 ms to 65.0 ms between the two cases (30.0 %)"),
        (only(*PAIR), {"ddp": load(others=0.6)}, "used 0.0 of 2 cores in one case, 0.6 in the other (30.0 %)"),
        (only(*PAIR, rounds=1), {"ddp": load(0.05, 0.09)}, "from 50.0 ms to 90.0 ms within a launch of ddp"),
        (only(*EVEN), {"fsdp2": load(0.05, 0.06)}, "That is more than the difference in step time (0.0 %)."),
        (only(*EVEN), {"fsdp2": load(0.05, 0.0504)}, ""),
        (run(PAIR, rounds=1, failed=False, fidelity="dryrun"), {}, ""),
    ],
)  # fmt: skip
def test_a_busy_machine_is_named_if_it_drifted_by_more_than_the_difference(
    made: Run, loads: dict[str, Load], text: str
) -> None:
    busy = found(with_load(made, loads)).busy
    assert text in busy
    assert bool(text) is bool(busy)
    assert found(made).busy == "", "it was not watched"


def test_drifts_are_those_of_common_rounds() -> None:
    """Two launches of ddp without a partner in their rounds do not count between the sides."""
    made = with_load(only(*PAIR), {})
    alone = [msgspec.structs.replace(made.launches[place], load=load(5.0, 5.0)) for place in (2, 4)]
    first, second = gather(msgspec.structs.replace(made, launches=(*made.launches[:2], *alone))).cases
    assert drift_over(first, second, 0.0) is None


def test_a_comparison_with_a_baseline_and_the_facts_name_the_drift() -> None:
    before = with_load(only(*PAIR), {})
    now = later(with_load(quicker(before, 1.1), {"ddp": load(0.08, 0.08)}), "now")
    assert "from 50.0 ms to 80.0 ms between the two cases (60.0 %)" in against(gather(now), gather(before)).sentences[1]
    found = {fact.label: fact for fact in trust(gather(with_load(only(*PAIR), {"ddp": load(0.05, 0.06, 0.4)})))}
    assert found["Machine drift"].value == "up to 20.0 %"
    assert "other processes used at most 0.4 of 2 cores" in found["Machine drift"].detail
    assert within_launch(gather(only(*PAIR)).cases[0]) is None
