"""What is said of traces, in sentences, tables and charts: by figures whose answer is known."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refshard.analysis.figures import (
    Cause,
    CommunicationFigures,
    ExposedSplit,
    GiveWay,
    IdleFigures,
    LoneCopy,
    MemoryPoint,
    MessageFigures,
    PeerWait,
    RankWait,
    TraceFigures,
    TraceWarning,
    WindowFigures,
)
from refshard.analysis.names import LONGEST
from refshard.quantities import format_ns
from refshard.report.draw.charts import chart
from refshard.report.trace import charts as trace_captions
from refshard.report.trace import charts as trace_charts
from refshard.report.trace import charts as trace_gaps
from refshard.report.trace import findings as trace_doubts
from refshard.report.trace import findings as trace_words
from refshard.report.trace import findings as waiting
from refshard.report.trace import tables as trace_tables
from refshard.report.trace import wording as trace_jobs
from refshard.report.trace.answer import trace_answer
from refshard.report.trace.charts import chart_of_cpu
from refshard.report.trace.idle import idle_section
from refshard.report.trace.wording import in_each, of_each, per
from tests.report import traces
from tests.report.printed import opened, rows, tables

MS = 1_000_000
GPU = traces.gpu(layers=4)


def job_rows(*figures: TraceFigures) -> list[dict[str, str]]:
    """The rows of one job's table."""
    return rows(tables(trace_answer([traces.analysis(one) for one in figures]))[0])


def made(
    *, span: int = 100, compute: int = 60, comm: int = 50, exposed: int = 20, host: int | None = 5,
    dependency: int | None = 10, call: int = 0, lost: int = 1, copies: int = 0,
    lone: int = 0, **others: Any,
) -> TraceFigures:  # fmt: skip
    """Two equal steps, times in ms; 5 ms of other work beside compute, communication and 15 ms of idle."""
    base = traces.figures(GPU)
    part = msgspec.structs.replace(
        base.whole, span_ns=span * MS, busy_ns=(span - 15) * MS, compute_ns=compute * MS, comm_ns=comm * MS,
        exposed_ns=exposed * MS, idle_ns=15 * MS, idle_launch_ns=None if host is None else host * MS,
        idle_call_ns=None if host is None else call * MS, idle_back_to_back_ns=None if host is None else 0,
        idle_dependency_ns=None if dependency is None else dependency * MS,
        idle_unknown_ns=(15 - (host or 0) - call - (dependency or 0)) * MS, lone_copy_ns=lone * MS,
    )  # fmt: skip
    step = msgspec.structs.replace(
        base.steps[0],
        breakdown=part,
        giveway=msgspec.structs.replace(base.giveway, lost_ns=lost * MS),
        copies=msgspec.structs.replace(base.copies, exposed_ns=copies * MS),
    )
    return msgspec.structs.replace(base, **{"steps": (step, step), "whole": part, "waits_for": (), **others})


def lead(figures: Sequence[TraceFigures]) -> str:
    (finding,) = trace_words.findings(figures)
    return finding.lead


@pytest.mark.parametrize(
    ("figures", "loss"),
    [
        (made(), "exposed communication: 20.0 %"),
        (made(exposed=3, dependency=10, host=5), "idle time waiting for another stream: 10.0 %"),
        (made(exposed=3, dependency=5, host=10), "launch-bound idle time: 10.0 %"),
        (made(exposed=3, dependency=1, host=2, call=9), "idle time in blocking calls: 9.0 %"),
        (made(exposed=3, dependency=1, host=2), "idle time of unknown cause: 12.0 %"),
        (made(exposed=3, dependency=None, host=None), "idle time of unknown cause: 15.0 %"),
        (made(exposed=3, lost=30), "reductions held up by slow preparatory kernels (give-way): 30.0 %"),
        (made(exposed=3, copies=30), "exposed copies into and out of collective buffers: 30.0 %"),
    ],
)
def test_the_largest_loss_leads(figures: TraceFigures, loss: str) -> None:
    assert lead([figures]) == f"The largest loss is {loss} of a step of 100 ms."


@pytest.mark.parametrize(
    ("count", "told"), [(40, "Try: fewer and larger kernels"), (4, "Try: move what the host does")]
)
def test_idle_time_is_told_with_what_was_waited_for_and_how_long_gaps_are(count: int, told: str) -> None:
    """20 ms in 40 gaps are launches one by one; in 4 of them the host did something else."""
    idle = IdleFigures(cause=Cause.LAUNCH, what="aten::mm", ns=20 * MS, count=count, longest_ns=9 * MS)
    (finding,) = trace_words.findings([made(exposed=3, host=10, dependency=5, idle=(idle,))])
    assert finding.more[0] == (
        f"Launch-bound idle time is longest before aten::mm: 10.0 ms a step, 100 % of it ({count} gaps in all, the "
        "longest 9.00 ms)."
    )
    assert finding.more[1].startswith(told)


@pytest.mark.parametrize(
    ("cause", "what", "told"),
    [
        (Cause.CALL, "cudaFree", "Idle time in blocking calls is longest in gaps spent mostly in cudaFree: "),
        (
            Cause.DEPENDENCY,
            "stream 0 waits for stream 4",
            "Idle time waiting for another stream is longest where stream 0 waits for stream 4: ",
        ),
        (Cause.UNKNOWN, "aten::mm", "Idle time of unknown cause is longest before aten::mm: "),
    ],
)
def test_the_first_sentence_names_the_loss_that_it_is_about(cause: Cause, what: str, told: str) -> None:
    """In a terminal the verdict stands below it."""
    sizes = {Cause.CALL: {"call": 9}, Cause.DEPENDENCY: {"dependency": 9}}.get(cause, {})
    idle = IdleFigures(cause=cause, what=what, ns=18 * MS, count=1, longest_ns=18 * MS)
    figures = made(exposed=3, **{"host": 1, "dependency": 1, **sizes}, idle=(idle,), rank=3)
    (finding,) = trace_words.findings([figures])
    assert finding.more[0] == f"{told}9.00 ms a step, 100 % of it (1 gap)."
    both = trace_words.findings([figures, msgspec.structs.replace(figures, rank=4)])[0]
    assert both.more[0].startswith(f"On rank 3, {told[0].lower()}{told[1:]}")


def test_a_loss_that_nothing_names_is_in_its_remedy() -> None:
    (finding,) = trace_words.findings([made(exposed=3, host=10, dependency=5)])
    assert finding.more[0].startswith("To reduce launch-bound idle time, try: fewer and larger kernels")
    (finding,) = trace_words.findings([made(exposed=3, host=10, dependency=5, device="cpu")])
    assert finding.lead == "The largest loss is idle time between operators: 10.0 % of a step of 100 ms."


def test_a_trace_without_steps_has_no_times_per_step() -> None:
    idle = IdleFigures(cause=Cause.LAUNCH, what="aten::mm", ns=20 * MS, count=40, longest_ns=9 * MS)
    step = msgspec.structs.replace(made(exposed=3, host=10, dependency=5).steps[0], step=None)
    (finding,) = trace_words.findings([made(steps=(step,), idle=(idle,))])
    assert finding.lead == "The largest loss is launch-bound idle time: 10.0 % of the trace (100 ms)."
    assert finding.more[0].startswith("Launch-bound idle time is longest before aten::mm: 20.0 ms in the trace, ")
    section = opened(idle_section(made(steps=(step,), idle=(idle,))))
    assert section.rows == [
        {
            "cause": "launch-bound", "what": "aten::mm", "in the trace": "20.0 ms", "share": "20.0 %",
            "gaps": "40", "longest": "9.00 ms",
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "windows", "head", "after", "share"),
    [
        (3, False, "per step", "a step", "a step"),
        (0, False, "in the trace", "in the trace", "the trace"),
        (3, True, "per window", "a window", "a window"),
        (1, True, "in the window", "in the window", "the window"),
    ],
)
def test_times_are_of_steps_windows_or_the_whole(
    steps: int, *, windows: bool, head: str, after: str, share: str
) -> None:
    chosen = WindowFigures(window="x", groups=()) if windows else None
    figures = made(steps=made().steps[:1] * steps, windows=chosen)
    assert (per(figures), in_each(figures), of_each(figures)) == (head, after, share)


def test_one_ranks_exposed_communication_asks_for_all_ranks_first() -> None:
    """Larger buckets help where the link is slow, and not where ranks wait."""
    whole = ExposedSplit(
        step=None, exposed_ns=60 * MS, transfer_ns=None, waiting_ns=None, undivided_ns=60 * MS, launch_ns=0
    )
    told = CommunicationFigures(
        whole=whole, steps=(), messages=(), bound="below", profile=None, no_launch=None,
        missing="the traces of the other ranks are not here",
    )  # fmt: skip
    first = msgspec.structs.replace(made().collectives[0], op="all_reduce", unit=None, step=0, exposed_ns=60 * MS)
    (finding,) = trace_words.findings([made(exposed=30, collectives=(first,), communication=told)])
    assert finding.more[1:3] == (
        "Waiting for other ranks cannot be told from a slow link: the traces of the other ranks are not here. Record "
        "the same steps on all 8 ranks, a file each, and run refshard trace on their folder.",
        "If the ranks hardly wait, try: larger buckets, gradients in bf16, overlap with backward, or gradient "
        "accumulation without reductions in between.",
    )


def test_a_compute_bound_job_is_one_over_all_ranks() -> None:
    fast, slow = made(compute=85), made(compute=95)
    assert lead([fast]).startswith("The largest loss is ")
    assert lead([fast, slow]).startswith("Compute-bound: compute takes 90 % of a step. The largest loss is ")


def test_no_small_loss_is_called_the_largest() -> None:
    small = made(span=10_000, exposed=3, host=5, dependency=10, lost=1)
    assert lead([small]) == "No loss reaches 1 % of a step of 10.0 s."


def wait(rank: int, ms: int, collectives: int = 1) -> RankWait:
    return RankWait(rank=rank, waited_ns=ms * MS, collectives=collectives)


def exposing(ms: int, waits: dict[int, int]) -> CommunicationFigures:
    """The exposed communication of two equal steps, with what of them, in ms over both, was waiting for which rank."""
    peers = tuple(PeerWait(rank=rank, waited_ns=total * MS // 2) for rank, total in waits.items())
    waiting = sum(peer.waited_ns for peer in peers)
    step = ExposedSplit(
        step=0, exposed_ns=ms * MS, transfer_ns=ms * MS - waiting, waiting_ns=waiting, undivided_ns=0, launch_ns=0,
        waits_for=peers,
    )  # fmt: skip
    return CommunicationFigures(
        whole=step, steps=(step, step), messages=(), bound=None, profile=None, missing=None, no_launch=None
    )


def test_a_job_is_told_with_its_extremes_and_its_late_rank() -> None:
    ranks = [made(exposed=20 + 10 * n, rank=n, waits_for=(wait(2, 2),), collectives=()) for n in (0, 1)]
    ranks.append(made(exposed=25, rank=2, waits_for=(wait(0, 1),), collectives=()))
    (finding,) = trace_words.findings(ranks)
    assert "25.0 % of a step of 100 ms (from 20.0 % on rank 0 to 30.0 % on rank 1)" in finding.lead
    assert finding.more[0].startswith("To reduce exposed communication, try: gather earlier")
    assert finding.more[1] == (
        "Of the 3 ranks here, rank 2 is waited for longest: the 2 others wait 1.00 ms a step for it on average "
        "(80 % of all waiting between them)."
    )
    assert waiting.late(ranks[:1] + ranks[2:]).startswith(
        "Of the 2 ranks here, rank 2 is waited for longest: rank 0 waits 1.00 ms a step for it (67 %"
    )


def test_no_rank_is_waited_for_longer_than_a_step() -> None:
    """Seven ranks that each wait for 90 of 100 ms wait 90 ms, not 630."""
    ranks = [made(rank=n, waits_for=(wait(7, 180),)) for n in range(7)] + [made(rank=7)]
    assert "the 7 others wait 90.0 ms a step for it on average" in waiting.late(ranks)


@pytest.mark.parametrize(
    ("compute", "advice"),
    [
        (80, "Rank 0 computes 80.0 ms a step against 60.0 ms: balance the work, or look at that host."),
        (61, "Rank 0 computes about as long (61.0 ms a step against 60.0 ms): look at what else delays that host."),
        (40, "Rank 0 computes less (40.0 ms a step against 60.0 ms): look at what else delays that host."),
    ],
)
def test_exposed_communication_that_is_waiting_asks_for_balance(compute: int, advice: str) -> None:
    # Two steps of 30 ms exposed, so that 15 ms a step are half of it.
    waiting = made(exposed=30, rank=1, communication=exposing(30, {0: 32}))
    (finding,) = trace_words.findings([made(compute=compute, rank=0), waiting])
    told = "Rank 1 exposes 30.0 ms a step, 16.0 ms of it waiting in collectives for rank 0 to enter. "
    assert told + advice in finding.more
    assert not any(sentence.startswith("Try: ") for sentence in finding.more)
    less = msgspec.structs.replace(waiting, communication=exposing(30, {0: 28}))
    assert any(told.startswith("Try: ") for told in trace_words.findings([made(rank=0), less])[0].more)


def test_of_several_late_ranks_the_one_waited_for_longest_is_named() -> None:
    (finding,) = trace_words.findings([made(rank=1, exposed=30, communication=exposing(30, {5: 30, 3: 10}))])
    assert "20.0 ms of it waiting in collectives for the last rank (longest for rank 5: 15.0 ms) to enter" in str(
        finding.more
    )
    assert "Balance the work, or look at the host of rank 5." in str(finding.more)


def test_exposed_time_of_an_operation_is_that_of_its_messages() -> None:
    """Collectives that run at once are each exposed; a message owns its nanoseconds alone."""
    first = msgspec.structs.replace(made().collectives[0], step=0, op="all_gather", exposed_ns=40 * MS)
    two = tuple(msgspec.structs.replace(first, unit=unit) for unit in ("layers.0", "layers.1"))
    (finding,) = trace_words.findings([made(exposed=30, collectives=two)])
    assert finding.more[0] == (
        "Most exposed on rank 0: all_gather, 40.0 ms a step (sum over concurrent collectives); the unit with most of "
        "it is layers.0 (20.0 ms)."
    )
    message = MessageFigures(
        op="all_gather", group=None, description=None, group_size=8, nodes=None, count=2, bytes=None, least_bytes=None,
        most_bytes=None, exposed_ns=60 * MS, waiting_ns=None, bus_bandwidth=None, transfer_bandwidth=None,
        largest_bandwidth=None, link_bandwidth=None, is_latency_bound=None,
    )  # fmt: skip
    told = msgspec.structs.replace(exposing(30, {}), messages=(message,))
    (finding,) = trace_words.findings([made(exposed=30, collectives=two, communication=told)])
    assert finding.more[0] == (
        "Most exposed on rank 0: all_gather, 30.0 ms a step; the unit with most of it is layers.0 (20.0 ms)."
    )


@pytest.mark.parametrize(
    ("op", "unit", "remedy"),
    [
        ("all_reduce", None, "larger buckets"),
        ("all_gather", "layers.0", "prefetch earlier"),
        ("reduce_scatter", "layers.0", "reduce in bf16"),
        ("all_to_all", None, "balance what ranks send each other"),
        ("all_to_all", "layers.0", "start it earlier"),  # shards of a unit, not tokens of experts
        ("send_recv", None, "more and smaller microbatches"),
        ("broadcast", None, "broadcast less often"),
        ("dispatch", None, "balance what ranks send each other"),
        ("notify", None, "balance what ranks send each other"),
        ("exchange", None, "gather earlier"),
    ],
)
def test_the_remedy_knows_the_operation(op: str, unit: str | None, remedy: str) -> None:
    first = msgspec.structs.replace(made().collectives[0], op=op, unit=unit, step=0, exposed_ns=30 * MS)
    (finding,) = trace_words.findings([made(exposed=30, collectives=(first,))])
    (told,) = (sentence for sentence in finding.more if sentence.startswith("Try: "))
    assert told.startswith(f"Try: {remedy}")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "copy from pinned memory"),
        ("CopyDeviceToHost", "copy to pinned memory"),
        ("Memset (Device)", "fill less"),
        ("Memcpy DtoD (Device -> Device)", "copy less"),
    ],
)
def test_copies_alone_are_a_loss_with_a_remedy_for_their_kind(name: str, remedy: str) -> None:
    """A step that only copies loses nothing by any other measure."""
    figures = made(exposed=3, host=5, lone=60, lone_copies=(LoneCopy(name=name, ns=100 * MS, count=4),))
    (finding,) = trace_words.findings([figures])
    assert finding.lead == "The largest loss is copies beside which nothing else runs: 60.0 % of a step of 100 ms."
    assert finding.more[0] == (f"Most of the time of copies alone: {name}, 50.0 ms a step, 83 % of it (4 in all).")
    assert finding.more[1].startswith(f"To reduce copies alone, try: {remedy}")


def test_concurrent_copies_are_said_to_be_summed() -> None:
    figures = made(exposed=3, lone=60, lone_copies=(LoneCopy(name="Memset (Device)", ns=130 * MS, count=4),))
    (finding,) = trace_words.findings([figures])
    assert "65.0 ms a step, sum over concurrent copies (4 in all)" in finding.more[0]


def test_a_kernel_that_is_waited_for_has_a_short_name() -> None:
    """The names of lambdas in templates have hundreds of letters, and would make a table wider than any terminal."""
    kernel = f"void clover::par_ranged2d_kernel<ideal_gas_kernel({', '.join(['clover::Buffer2D<double> &'] * 9)})>(T1)"
    idle = IdleFigures(cause=Cause.LAUNCH, what=kernel, ns=20 * MS, count=2, longest_ns=9 * MS)
    figures = made(exposed=3, dependency=5, host=10, idle=(idle,))
    (finding,) = trace_words.findings([figures])
    section = opened(idle_section(figures))
    assert len(section.rows[0]["what"]) <= LONGEST
    assert f" is longest before {section.rows[0]['what']}: " in finding.more[0]


def uneven(*lengths: int, exposed: int = 3) -> TraceFigures:
    """Steps of these lengths in ms; what one is longer than 100 ms by is blocked calls."""
    base = made(exposed=exposed)
    steps = []
    for number, length in enumerate(lengths, 4):
        part = base.steps[0].breakdown
        more = (length - 100) * MS
        idle = msgspec.structs.replace(
            part, span_ns=part.span_ns + more, idle_ns=part.idle_ns + more, idle_call_ns=more
        )
        steps.append(msgspec.structs.replace(base.steps[0], step=number, breakdown=idle))
    return msgspec.structs.replace(base, steps=tuple(steps))


def test_a_step_that_warms_up_is_told_apart() -> None:
    """Its blocked calls are the mean's largest loss; the steps that count lose to a stream."""
    (finding,) = trace_words.findings([uneven(400, 100, 100)])
    assert finding.lead.startswith("The largest loss is idle time in blocking calls: 50.0 % of a step of 200 ms")
    assert finding.more[0] == (
        "Step 4 takes 400 ms, the others 100 ms: the means over all steps are of neither. Without it the largest loss "
        "is idle time waiting for another stream, 10.0 % of a step of 100 ms. Record later, after the warm-up."
    )


def test_several_long_steps_in_the_middle() -> None:
    (finding,) = trace_words.findings([uneven(100, 400, 100, 200, 100)])
    assert finding.more[0] == (
        "Steps 5, 7 take 300 ms on average, the others 100 ms: the means over all steps are of neither. Without them "
        "the largest loss is idle time waiting for another stream, 10.0 % of a step of 100 ms."
    )


@pytest.mark.parametrize("lengths", [(400, 100), (140, 100, 100), (100, 100, 100)])
def test_steps_that_are_alike_or_few_are_not(lengths: tuple[int, ...]) -> None:
    (finding,) = trace_words.findings([uneven(*lengths)])
    assert "the means over all steps" not in str(finding.more)


def test_a_step_is_long_only_if_it_is_on_every_rank() -> None:
    alike = msgspec.structs.replace(uneven(100, 100, 100), rank=1)
    (finding,) = trace_words.findings([uneven(400, 100, 100), alike])
    assert "the means over all steps" not in str(finding.more)


def test_a_cpu_is_not_advised_cuda_graphs() -> None:
    assert "CUDA graphs" in str(trace_words.findings([made(exposed=3, host=30)]))
    assert "CUDA" not in str(trace_words.findings([made(exposed=3, host=30, device="cpu")]))


HASHED = ("fsdp2-w2-tiny-5a30c0d831ee-r0-rank{}.json.gz", "yafsdp-w2-tiny-7c1d8d39291c-r0-rank{}.json.gz")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ([[name.format(rank) for rank in (0, 1)] for name in HASHED], ["fsdp2", "yafsdp"]),
        ([[HASHED[0].format(0), HASHED[0].format(1)]], ["fsdp2-w2-tiny-r0"]),
        ([["a-5a30c0d831ee-rank0.json"], ["a-7c1d8d39291c-rank0.json"]], ["a-5a30c0d831ee", "a-7c1d8d39291c"]),
        ([["one/rank0.json"], ["two/rank0.json"]], ["one", "two"]),
        ([["rank0.json"], ["rank0.json"]], ["job 0", "job 1"]),
        ([["rank0.json", "rank1.json"]], ["job 0"]),
        ([["a.internal_8586.17.pt.trace.json", "a.internal_8587.18.pt.trace.json"]], ["a.internal"]),  # processes
        ([["runs/four/447.json", "runs/four/448.json"]], ["four"]),
    ],
)
def test_jobs_are_named_by_what_tells_their_files_apart(files: list[list[str]], names: list[str]) -> None:
    members = [made(job=job, file=file, rank=rank) for job, of in enumerate(files) for rank, file in enumerate(of)]
    assert list(trace_jobs.job_names(members).values()) == names


def test_devices_counted_together_are_told_first() -> None:
    """What one device computes hides the idle time and the communication of the other: no figure is of either."""
    told = TraceWarning(code="several_devices", message="events of 2 devices are counted together", count=2)
    (finding,) = trace_words.findings([made(warnings=(told,))])
    assert finding.more[0] == "Events of 2 devices are counted together."


@pytest.mark.processes
@pytest.mark.parametrize("command", ["trace", "dryrun", "plan"])
def test_text_needs_neither_pandas_nor_plotly(command: str) -> None:
    """Both take a second to import; only pages and the Python API need them."""
    code = f"import sys, refshard.commands.{command}; print({{'pandas', 'plotly'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_warning_of_many_traces_is_told_once() -> None:
    few, lost = TraceWarning(code="few", message="Few steps.", count=3), TraceWarning(code="x", message="Lost.", ns=MS)
    given = [made(file=f"r{n}", warnings=(few, lost) if n == 1 else (few,)) for n in range(9)]
    assert trace_doubts.warnings_text(given) == [
        "[few] Few steps. (3 events) (all 9 traces)",
        "[x] Lost. (1.00 ms) (r1)",
    ]
    assert trace_doubts.warnings_text(given[:1]) == ["[few] Few steps. (3 events)"]


@pytest.mark.parametrize(
    ("message", "told"),
    [("1,200 spans lost", "1,200 spans lost"), ("1200 lost", "1200 lost"), ("12003 lost", "12003 lost (1,200 events)")],
)
def test_a_warning_tells_its_count_once(message: str, told: str) -> None:
    assert trace_doubts.warning(TraceWarning(code="x", message=message, count=1200)) == told
    assert trace_doubts.warning(TraceWarning(code="x", message="2.00 ms lost", ns=2 * MS)) == "2.00 ms lost"


def test_a_rank_s_row_holds_means_and_says_what_is_not_known() -> None:
    figures = made(host=None, dependency=None, rank=None, world_size=None, giveway=GiveWay(reason="too few samples"))
    (row,) = job_rows(figures)
    assert (row["per step"], row["exposed"], row["overlap"]) == ("100 ms", "20.0 ms (20 %)", "60.0 %")
    assert row["rank"] == "-"
    assert not {"late reductions (give-way)", "device", "idle, host late"} & set(row)
    assert [row["steps"] for row in job_rows(made(steps=()), figures)] == ["-", "2"]
    devices = [row["device"] for row in job_rows(made(file="a"), made(file="b", device="B200"))]
    assert devices == ["NVIDIA H100 80GB HBM3", "B200"]


def test_exposed_to_all_is_told_where_it_differs() -> None:
    figures = made()
    assert "exposed to all" in job_rows(figures)[0]
    alike = msgspec.structs.replace(figures.whole, exposed_any_ns=figures.whole.exposed_ns)
    assert "exposed to all" not in job_rows(made(steps=(), whole=alike))[0]


def test_sizes_that_round_alike_are_told_exactly() -> None:
    one = traces.figures(GPU).collectives[0]
    of = [msgspec.structs.replace(one, bytes=size, group=None) for size in (1_048_576, 1_049_600, 2_097_152)]
    found = trace_tables.collectives(made(collectives=tuple(of)))
    assert [row["bytes"] for row in found] == ["1,048,576 B", "1,049,600 B", "2.00 MiB"]
    assert {(row["group"], row["count"]) for row in found} == {("unknown (8 ranks)", "0.5")}


def test_units_and_waits_are_told_per_step() -> None:
    figures = made(waits_for=(wait(3, 10, collectives=4),))
    first = figures.units[0]
    assert trace_tables.per_step(figures) == "per step, mean of 2"
    assert str(trace_tables.units(figures)[0]["compute"]) == format_ns(first.compute_ns / 2)
    (row,) = rows(trace_tables.waits([figures]))
    assert (row["waited"], row["share of the step"], row["exposed"], row["collectives"]) == (
        "5.00 ms",
        "5.0 %",
        "-",
        "2",
    )
    told = made(waits_for=(wait(3, 10), wait(4, 8)), communication=exposing(20, {3: 6}))
    assert [row["exposed"] for row in rows(trace_tables.waits([told]))] == ["3.00 ms", "0 s"]
    assert trace_tables.per_step(made(steps=())) == "over the whole trace"


@pytest.mark.parametrize("figures", [made(), made(host=None, dependency=None)])
def test_the_parts_of_a_step_add_up_to_it(figures: TraceFigures) -> None:
    parts = trace_charts.split(figures.steps[0].breakdown)
    assert sum(parts.values()) == 100 * MS
    assert parts["compute alone"] == 30 * MS
    assert parts["compute over communication"] == 30 * MS
    assert parts["other"] == 5 * MS


@pytest.mark.parametrize("timeline", [traces.gpu(), traces.cpu()])
def test_the_parts_of_a_made_step_add_up_and_none_is_negative(timeline: Any) -> None:
    for step in traces.figures(timeline).steps:
        parts = trace_charts.split(step.breakdown)
        assert sum(parts.values()) == step.breakdown.span_ns
        assert min(parts.values()) >= 0


def test_a_cpus_chart_names_idle_time_between_operators() -> None:
    drawn = chart("steps", "Where each step goes", trace_charts.step_bars(made(host=5)), "")
    names = [bar["name"] for bar in drawn.figure["data"]]
    renamed = chart_of_cpu(drawn)
    assert "idle, launch-bound" in names
    assert [bar["name"] for bar in renamed.figure["data"]] == [
        "idle, between operators" if name == "idle, launch-bound" else name for name in names
    ]
    assert "launch-bound" not in str(renamed.figure)


def test_ranks_stand_beside_each_other_by_job() -> None:
    ranks = [
        made(job=job, rank=rank, file=f"{job}x-rank{rank}", exposed=20 + rank) for job in (0, 1) for rank in (0, 1)
    ]
    drawn = trace_charts.ranks_chart(ranks)
    assert drawn is not None
    bars = {bar["name"]: bar for bar in drawn.figure["data"]}
    assert bars["exposed communication"]["x"] == [20, 21, 20, 21]
    assert bars["exposed communication"]["y"] == [1, 2, 4, 5]
    rows = [row["text"] for row in drawn.figure["layout"]["meta"]["rows"]]
    assert rows == ["<b>0x</b>", "rank 0", "rank 1", "<b>1x</b>", "rank 0", "rank 1"]
    assert trace_charts.ranks_chart(ranks[:1]) is None


def test_of_many_ranks_the_slowest_are_drawn() -> None:
    many = [made(rank=rank, span=100 + (37 * rank) % 60) for rank in range(60)]
    drawn = trace_charts.ranks_chart(many)
    assert drawn is not None
    assert len(drawn.figure["data"][0]["x"]) == trace_charts.MOST_RANKS
    assert "Of 60 ranks, the 40 with the longest step are drawn." in drawn.alternative
    assert "to 159 ms on " in drawn.alternative


def test_a_trace_without_steps_is_one_bar_of_the_whole() -> None:
    step = msgspec.structs.replace(made().steps[0], step=None)
    figures = made(steps=(step,))
    bars = trace_charts.step_bars(figures)
    assert list(bars.layout.yaxis.ticktext) == ["whole trace"]
    assert bars.layout.xaxis.title.text == "ms in the trace"
    assert trace_captions.steps_caption(figures).startswith("The whole trace, which has no steps: ")


def test_each_gap_is_in_the_histogram_once_by_its_time() -> None:
    figures = traces.figures(GPU)
    sets = trace_gaps.gaps_of(figures, GPU)
    assert sum(len(one.lengths) for one in sets if one.style.startswith("gap")) == sum(
        1 for one in figures.collectives if one.gap_ns
    )
    lengths = {one.style: sum(one.lengths) for one in sets}
    assert sum(ns for style, ns in lengths.items() if style.startswith("idle")) == figures.whole.idle_ns
    histogram = trace_gaps.gap_histogram(sets)
    counts = [sum(count for count, _ in bar.customdata) for bar in histogram.data]
    assert counts == [len(one.lengths) for one in sets]
    # The axes are in ms, for the most that a bin holds is 1 ms or more.
    assert [sum(bar.y) for bar in histogram.data] == pytest.approx([sum(one.lengths) / MS for one in sets])


def test_the_table_of_gaps_holds_counts_and_times() -> None:
    sets = [
        trace_gaps.GapSet(style="idle-unknown", lengths=(1000, 1999, 2000)),
        trace_gaps.GapSet(style="gap", lengths=(7,)),
    ]
    found = {row["length"]: row for row in trace_gaps.gap_table(sets)}
    assert found["1 us to 2 us"]["idle, cause unknown"] == "2 (3.00 us)"
    assert found["2 us to 5 us"]["idle, cause unknown"] == "1 (2.00 us)"
    assert found["5 ns to 10 ns"]["between collectives, other"] == "1 (7 ns)"


def test_a_long_memory_timeline_is_thinned_but_keeps_its_peak() -> None:
    points = [MemoryPoint(device="cuda:0", ns=n, bytes=1000 + n % 7) for n in range(100_000)]
    points[61_803] = MemoryPoint(device="cuda:0", ns=61_803, bytes=5000)
    kept = trace_charts.thinned(points)
    assert len(kept) <= trace_charts.MOST_POINTS
    assert max(point.bytes for point in kept) == 5000
    assert [point.ns for point in kept] == sorted(point.ns for point in kept)
    assert "peak of 4.88 KiB" in trace_captions.memory_caption(points)


def test_a_trace_without_collectives_or_gaps_is_still_told() -> None:
    bare = replace(GPU, collectives=())
    figures = msgspec.structs.replace(made(), collectives=(), units=(), waits_for=(), memory=(), steps=())
    assert trace_tables.collectives(figures) == []
    assert lead([figures]).endswith("20.0 % of the trace (100 ms).")
    assert trace_charts.charts_of(figures, trace_gaps.gaps_of(figures, bare), "t")
