"""The verdict's sentences, word for word, on runs whose numbers are known."""

from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.records import Run, StepTrace
from refshard.report.run.verdict import caveats, findings, modelled, overview, unfinished, unranked
from refshard.specs.case import Fidelity
from tests.report.runs import CASES, HOSTILE, Made, both, run, with_record

BY_NAME = {made.strategy: made for made in CASES}


def only(*made: Made, rounds: int = 3) -> Run:
    """A run of these cases in three rounds, nothing failed."""
    return run(made, rounds=rounds, failed=False)


def told(made: Run) -> tuple[str, ...]:
    """The sentences of a run with one comparison."""
    (finding,) = findings(gather(made))
    return finding.sentences


def test_the_sentences_of_the_made_run() -> None:
    (finding,) = findings(gather(run()))
    assert finding.lead == "refshard-yafsdp is fastest (40.0 ms per step) and needs the least memory (240 MiB)."
    assert finding.sentences == (
        "refshard-yafsdp is fastest at 40.0 ms per step.",
        "Next: refshard-fsdp takes 48.0 ms, 20.0 % longer, paired by round (95 % interval 20.0 to 20.0 %; "
        "significant).",
        "In the traces, most of the difference is exposed communication: 6.00 ms per step in refshard-fsdp, 1.00 ms in "
        "refshard-yafsdp.",
        "refshard-yafsdp needs the least memory: 240 MiB per rank (peak). Next: refshard-fsdp with 280 MiB, 16.7 % "
        "more.",
    )
    assert unranked(gather(run())) == (
        f"fsdp2-tuned, 2 ranks: failed in 1 of 3 rounds (RuntimeError: mat1 and mat2 shapes differ {HOSTILE}).",
    )


def test_the_lead_names_few_strategies_and_counts_many() -> None:
    fast = replace(BY_NAME["refshard-yafsdp"], peak_mib=500)
    (finding,) = findings(gather(only(fast, *CASES[1:4])))
    assert finding.lead == (
        "refshard-yafsdp is fastest (40.0 ms per step); refshard-fsdp needs the least memory (280 MiB)."
    )
    alike = [replace(made, step_time=0.04 + 0.0001 * place, peak_mib=100) for place, made in enumerate(CASES[1:])]
    (finding,) = findings(gather(run(alike, rounds=1, failed=False, fidelity="dryrun")))
    assert finding.lead == "4 strategies tie for fastest (40.0 to 40.3 ms per step)."
    assert finding.margin == "Differences under 3 % are within the model's error."


RANKING = ("fastest", "Next: ", "longer", "shorter", "significant", "tie", "times as long")
"""Words that rank by time; in a run without memory or traces nothing else says them."""


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("fidelity", ["measured", "emulated"])
def test_under_three_launches_nothing_is_ranked_by_time(rounds: int, fidelity: Fidelity) -> None:
    """However far apart: the same code launched three times in a quarter of an hour differed by 82 %."""
    bare = [replace(made, peak_mib=100) for made in CASES[:3]]
    (finding,) = findings(gather(run(bare, rounds=rounds, failed=False, fidelity=fidelity)))
    assert finding.speed == f"Not ranked by time (n = {rounds}: no interval): ddp 50.0 ms and fsdp2 60.0 ms per step."
    assert (finding.fastest, finding.margin, finding.why) == ((), "", "")
    assert not any(word in sentence for word in RANKING for sentence in finding.sentences)


def test_one_strategy_of_three_launches_and_one_of_two_are_not_ranked() -> None:
    made = only(BY_NAME["ddp"], BY_NAME["fsdp2"])
    (finding,) = findings(gather(msgspec.structs.replace(made, launches=made.launches[:-1])))
    assert finding.speed == "Not ranked by time (n = 2: no interval): ddp 50.0 ms and fsdp2 59.7 ms per step."


def test_those_of_three_launches_are_ranked_and_the_rest_is_named() -> None:
    made = only(*CASES[1:4])
    (finding,) = findings(gather(msgspec.structs.replace(made, launches=made.launches[:-1])))
    assert finding.speed == "ddp is fastest at 50.0 ms per step."
    assert finding.margin.endswith(" Not ranked by time (n = 2: no interval): refshard-fsdp 47.8 ms per step.")


def test_a_dry_run_is_ranked_from_one_launch() -> None:
    """It takes the same time always."""
    (finding,) = findings(gather(run(CASES[1:3], rounds=1, failed=False, fidelity="dryrun")))
    assert finding.speed == "ddp is fastest at 50.0 ms per step."
    assert finding.margin == "Next: fsdp2 takes 60.0 ms, 20.0 % longer."


def test_the_reference_does_not_compete() -> None:
    """One unsharded rank that is faster than all must not win."""
    fast = replace(BY_NAME["single"], step_time=0.001, peak_mib=1)
    assert told(only(fast, *CASES[1:]))[0] == "refshard-yafsdp is fastest at 40.0 ms per step."


def test_the_reference_does_not_compete_on_one_rank_either() -> None:
    """Where nothing ran on more, the strategies are ranked at one rank."""
    alone = [replace(made, world_size=1) for made in (CASES[1], CASES[3])]
    fast = replace(BY_NAME["single"], step_time=0.001)
    assert told(only(fast, *alone))[:2] == (
        "refshard-fsdp is fastest at 48.0 ms per step.",
        "Next: ddp takes 50.0 ms, 4.2 % longer, paired by round (95 % interval 4.2 to 4.2 %; significant).",
    )


def test_a_failed_case_does_not_compete() -> None:
    """fsdp2-tuned took 41 ms in the round that it survived, which would make it the next."""
    assert "fsdp2-tuned" not in told(run())[1]


def test_strategies_within_the_noise_tie() -> None:
    """Rounds favour one, then the other: neither wins, and a third that is 20 % slower is named as the next."""
    made = only(
        replace(BY_NAME["ddp"], step_time=0.0400),
        replace(BY_NAME["fsdp2"], step_time=0.0401),
        replace(BY_NAME["refshard-fsdp"], step_time=0.0480),
    )
    for round_, factor in enumerate((1.02, 1.0, 0.98)):
        place = 3 * round_ + 1
        steps = tuple(tuple(factor * seconds for seconds in rank) for rank in made.launches[place].step_times_s)
        made = with_record(made, place, step_times_s=steps)
    speed, margin, *_ = told(made)
    assert speed == "ddp and fsdp2 tie for fastest: 40.0 to 40.1 ms per step."
    assert margin.startswith("fsdp2 takes 1.002 times as long as ddp, paired by round (95 % interval 0.9")
    assert margin.endswith(
        "which includes 1; more rounds would narrow it). Next: refshard-fsdp takes 48.0 ms, 20.0 % longer, paired by "
        "round (95 % interval 20.0 to 20.0 %; significant)."
    )


def test_a_small_difference_is_significant_but_called_small() -> None:
    margin = told(only(BY_NAME["ddp"], replace(BY_NAME["fsdp2"], step_time=0.0502)))[1]
    assert margin.endswith("0.4 % longer, paired by round (95 % interval 0.4 to 0.4 %; significant, but under 1%).")


def test_a_large_difference_is_told_as_a_multiple() -> None:
    margin = told(only(BY_NAME["ddp"], replace(BY_NAME["fsdp2"], step_time=0.125)))[1]
    assert margin == (
        "Next: fsdp2 takes 125 ms, 2.5 times as long, paired by round (95 % interval 2.500 to 2.500; significant)."
    )


def test_equal_memory_is_called_equal() -> None:
    sentences = told(only(BY_NAME["ddp"], replace(BY_NAME["fsdp2"], peak_mib=440.9), BY_NAME["single"]))
    assert sentences[-1] == "ddp and fsdp2 need the least memory: 440 MiB per rank (peak)."


def test_a_single_candidate_is_named_as_such() -> None:
    sentences = told(only(BY_NAME["single"], BY_NAME["ddp"]))
    assert sentences == ("ddp is the only strategy here that finished: 50.0 ms per step.",)


def test_a_run_of_references_alone_is_judged_by_itself() -> None:
    assert told(only(BY_NAME["single"])) == ("single is the only strategy here that finished: 80.0 ms per step.",)


def test_nothing_finished() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, state="oom", error="rank 0: out of memory")
    assert told(made) == ("No strategy finished, so there is nothing to rank.",)
    assert unranked(gather(made)) == ("ddp, 2 ranks: out of memory (rank 0: out of memory).",)


def test_every_world_size_above_one_is_a_comparison() -> None:
    made = only(*CASES, *(replace(case, world_size=4, step_time=case.step_time / 2) for case in CASES[1:3]))
    assert [finding.title.rpartition(", ")[2] for finding in findings(gather(made))] == ["2 ranks", "4 ranks"]
    assert [finding.speed for finding in findings(gather(made))] == [
        "refshard-yafsdp is fastest at 40.0 ms per step.",
        "ddp is fastest at 25.0 ms per step.",
    ]
    title = findings(gather(made))[0].title
    assert title == "llama-mini, global batch of 8 sequences of 256 tokens, 2 ranks"


def test_the_ratio_within_rounds_decides_over_the_medians() -> None:
    """The median of ddp is smaller, but in two rounds of three, on a slower machine, fsdp2 is 10 % faster."""
    made = only(BY_NAME["ddp"], BY_NAME["fsdp2"])
    for round_, (ddp, fsdp2) in enumerate(((0.050, 0.045), (0.100, 0.090), (0.010, 0.060))):
        for place, seconds in ((2 * round_, ddp), (2 * round_ + 1, fsdp2)):
            made = with_record(made, place, step_times_s=((seconds,) * 5,) * 2)
    assert told(made)[0].startswith("fsdp2 and ddp tie for fastest")


def test_an_empty_run_says_no_more_than_that() -> None:
    assert unfinished(gather(msgspec.structs.replace(run(), launches=()))) == ("Nothing was launched.",)


def test_a_long_error_is_shortened() -> None:
    (sentence,) = unranked(gather(with_record(run(), -1, error="x" * 500)))
    assert sentence.endswith(f"({'x' * 117}...).")


def told_why(compute: float, exposed: float, idle: float) -> list[str]:
    """The reason that is given when fsdp2, with these times in s, loses to ddp with 40, 9 and 2 ms."""
    rival = replace(BY_NAME["fsdp2"], compute=compute, exposed=exposed, idle=idle)
    return [sentence for sentence in told(only(BY_NAME["ddp"], rival)) if "In the traces" in sentence]


def test_the_reason_is_called_most_only_if_it_is() -> None:
    assert told_why(0.042, 0.016, 0.002)[0].startswith("In the traces, most of the difference is exposed communication")
    (largest,) = told_why(0.045, 0.015, 0.007)
    assert largest == (
        "In the traces, the largest part of the difference is exposed communication: 15.0 ms per step in fsdp2, 9.00 "
        "ms in ddp."
    )


def test_no_reason_is_given_where_the_traced_steps_of_both_overlap() -> None:
    made = only(BY_NAME["ddp"], BY_NAME["fsdp2"])

    def traced(exposed: tuple[int, int]) -> tuple[StepTrace, ...]:
        return tuple(
            StepTrace(rank=0, step=s, span_ns=1, compute_ns=1, comm_ns=9, exposed_ns=ns, idle_ns=0)
            for s, ns in enumerate(exposed)
        )

    apart = with_record(with_record(made, 0, steps=traced((1, 2))), 1, steps=traced((3, 4)))
    assert findings(gather(apart))[0].why
    assert not findings(gather(with_record(apart, 1, steps=traced((2, 4)))))[0].why


def test_no_reason_is_given_where_the_traced_pass_does_not_show_the_loss() -> None:
    assert told_why(0.020, 0.010, 0.002) == []


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "Not finished: 6 of 6 launches are done; the run was cut off, or is still under way."),
        (True, "Not finished: 6 of 6 launches are done; the run was interrupted."),
    ],
)
def test_a_run_that_did_not_end_by_itself_says_so(end: bool | None, words: str) -> None:
    made = only(BY_NAME["ddp"], BY_NAME["fsdp2"])
    assert made.end is not None
    closing = None if end is None else msgspec.structs.replace(made.end, interrupted=end)
    assert unfinished(gather(msgspec.structs.replace(made, end=closing))) == (words,)
    assert unfinished(gather(made)) == ()


def test_what_is_emulated_is_said_to_be_and_competes_with_its_like_only() -> None:
    emulated = gather(run(rounds=3, failed=False, fidelity="emulated"))
    assert modelled(emulated) == (
        "Not measured, but emulated on dgx-h100: one real rank; the other ranks are modelled.",
    )
    titles = [finding.title for finding in findings(gather(both("emulated")))]
    assert [title.partition("tokens, ")[2] for title in titles] == [
        "measured, 2 ranks", "emulated on dgx-h100, 2 ranks",
    ]  # fmt: skip
    assert modelled(gather(run())) == ()


def test_of_the_warnings_that_launches_left_the_first_is_told() -> None:
    made = with_record(with_record(only(*CASES), 1, warnings=("it\x1b[0m waited",)), 2, warnings=("so did it",))
    assert caveats(gather(made)) == ["Caution: ddp, 2 ranks: it waited; 1 more case has warnings: see --json."]


def test_few_comparisons_need_no_overview() -> None:
    assert overview(findings(gather(run()))) == ()


def test_many_comparisons_are_summed_up_by_fidelity() -> None:
    """Four world sizes, in one of which two strategies tie."""
    made = run(CASES[3:], rounds=3, failed=False)
    records = []
    for size in (2, 4, 8, 1):
        for record in made.launches:
            case = record.case.changed(gpus=size)
            even = size == 4
            times = made.launches[0].step_times_s if even else record.step_times_s
            records.append(msgspec.structs.replace(record, case=case, spec_hash=case.hash, step_times_s=times))
    found = findings(gather(msgspec.structs.replace(made, launches=tuple(records))))
    assert [finding.fastest for finding in found] == [
        ("refshard-yafsdp",), ("refshard-fsdp", "refshard-yafsdp"), ("refshard-yafsdp",),
    ]  # fmt: skip
    assert overview(found) == ()
    assert overview((*found, found[0])) == (
        "refshard-yafsdp was fastest in 3 of 4 comparisons; 1 was a tie. Lowest memory: refshard-yafsdp in 4.",
    )
    assert overview((found[1],) * 4)[0].startswith("All 4 comparisons are ties for the fastest strategy. ")
    assert {case.strategy for case in found[0].cases} == {"refshard-fsdp", "refshard-yafsdp"}
