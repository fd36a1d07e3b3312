"""What is said of a difference: which classes make it up, which ranks, and whether it could be chance."""

from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.attribution import Attribution, Owner, Work
from refshard.analysis.difference import Unlike, difference
from refshard.report.page import as_page
from refshard.report.trace.difference import Compared, by_class, difference_answer, not_alike, remarks, verdict
from tests.report.pages import Page
from tests.report.printed import rows, tables, text
from tests.report.traces import HOSTILE

MM = Work(kind="compute", operator="aten::mm", phase="forward")
GATHER = Work(kind="comm", operator="all_gather", phase="forward")
IDLE = Work(kind="idle", operator="aten::mm", phase="forward", bound="launch")


def side(*rows: tuple[Work, int], kernel: str = "k") -> Attribution:
    """Steps of one nanosecond per unit."""
    owners = tuple(Owner(work=work, ns=ns, count=1, kernels=((kernel, ns),)) for work, ns in rows)
    return Attribution(step_ns=(sum(ns for _, ns in rows),), owners=owners)


def compared(
    a: list[Attribution], b: list[Attribution], interval: tuple[float, float] | None = None, ranks: tuple[int, ...] = ()
) -> Compared:
    return Compared(names=("a", "b"), steps=(1, 1), difference=difference(a, b, ranks), interval=interval)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ((60_000, 30_000, 10_000), (90_000, 40_000, 11_000), "B takes 41.0 us (41.0 %) more per step than A: compute "
         "+30.0 us (73 % of the change), communication +10.0 us (24 %)."),
        ((90_000, 40_000, 11_000), (60_000, 30_000, 10_000), "B takes 41.0 us (29.1 %) less per step than A: compute "
         "-30.0 us (73 % of the change), communication -10.0 us (24 %)."),
        # A share over 100 %, or one below 0, would need a second reading.
        ((60_000, 30_000, 1), (50_000, 40_100, 1), "B takes 100 ns (0.1 %) more per step than A: communication "
         "+10.1 us, compute -10.0 us."),
        ((60_000, 30_000, 1), (90_000, 20_000, 1), "B takes 20.0 us (22.2 %) more per step than A: compute +30.0 us, "
         "communication -10.0 us."),
        ((60_000, 30_000, 1), (50_000, 40_000, 1), "B takes as long as A: communication +10.0 us, compute -10.0 us."),
        ((60_000, 30_000, 1), (60_000, 30_000, 1), "No difference."),
    ],
)  # fmt: skip
def test_the_verdict_has_the_classes_that_make_up_the_change(a: tuple[int, ...], b: tuple[int, ...], text: str) -> None:
    before, after = ([side(*zip((MM, GATHER, IDLE), ns))] for ns in (a, b))
    assert verdict(compared(before, after))[0] == text


def test_what_is_not_like_for_like_is_said_before_the_difference() -> None:
    unlike = (
        Unlike(what="device", a="H100", b="MI300X"),
        Unlike(what="world size", a="8", b="2"),
        Unlike(what="batch size", a="aten::mm [8,4]x[4,2]", b="aten::mm [16,4]x[4,2]"),
    )
    found = replace(compared([side((MM, 60_000))], [side((MM, 90_000))]), unlike=unlike)
    told = (
        "Not like for like: A and B differ in device (H100 and MI300X), world size (8 and 2) and batch size (for "
        "example aten::mm [8,4]x[4,2] and aten::mm [16,4]x[4,2])."
    )
    assert not_alike(found) == [told]
    assert verdict(found)[0] == "Not like for like: A and B differ in device, world size and batch size."
    assert verdict(found)[1].startswith("B takes 30.0 us")
    printed = " ".join(text(difference_answer(found)).split())
    assert printed.index(told) < printed.index("overlapping time counts once")
    written = "".join(as_page(difference_answer(found), product="trace", command="x"))
    shown = " ".join(Page(written).text.replace("\N{NO-BREAK SPACE}", " ").split())
    assert shown.index(verdict(found)[0]) < shown.index("B takes 30.0 us") < shown.index(told)
    assert not_alike(compared([side((MM, 1))], [side((MM, 2))])) == []


def test_a_change_within_the_scatter_of_steps_is_called_that() -> None:
    a, b = [side((MM, 60_000))], [side((MM, 61_000))]
    inside, outside, unknown = (compared(a, b, interval) for interval in ((-500.0, 2500.0), (500.0, 1500.0), None))
    assert verdict(inside)[2:] == [
        "The change is within step-to-step variation (95 % interval over steps -500 ns to +2.50 us)."
    ]
    assert verdict(outside)[2:] == verdict(unknown)[2:] == []
    assert remarks(outside)[0].startswith("95 % interval of the change over steps: +500 ns to +1.50 us.")
    assert remarks(unknown)[0].startswith("Fewer than 3 steps on a side")
    assert not remarks(inside)


def test_the_rank_that_changed_most_and_the_one_that_changed_least_are_named() -> None:
    a = [side((MM, 60_000))] * 3
    b = [side((MM, ns)) for ns in (61_000, 50_000, 63_000)]
    found = compared(a, b, (500.0, 1500.0), (4, 5, 6))
    assert remarks(found)[1] == "3 ranks: rank 5 (-10.0 us) changed most and rank 4 (+1.00 us) least."
    assert [row["rank"] for row in rows(tables(difference_answer(found))[-1])] == ["5", "6", "4"]


def test_time_that_only_one_side_spends_is_named() -> None:
    fused = msgspec.structs.replace(MM, operator="fused")
    found = remarks(compared([side((MM, 60_000), (GATHER, 1))], [side((fused, 40_000), (GATHER, 1))], (1.0, 2.0)))
    assert found[1].startswith("Only on one side: 60.0 us of A and 40.0 us of B.")
    nameless = msgspec.structs.replace(MM, by_name=True)
    found = remarks(compared([side((nameless, 60_000))], [side((nameless, 40_000))], (1.0, 2.0)))
    assert found[1].startswith("Operators unknown for 60.0 us of A and 40.0 us of B: their kernels are matched by name")


def test_compute_is_told_by_phase() -> None:
    backward, rest = (msgspec.structs.replace(MM, phase=phase) for phase in ("backward", None))
    a, b = [side((MM, 1_000), (backward, 2_000), (rest, 50))], [side((MM, 1_100), (backward, 2_300), (rest, 50))]
    found = [(row["class"], row["B - A"]) for row in rows(by_class(difference(a, b)))]
    assert found == [
        ("compute", "+400 ns"), ("- forward", "+100 ns"), ("- backward", "+300 ns"), ("- other", "0 s"),
        ("step", "+400 ns"),
    ]  # fmt: skip


def test_rows_add_up_to_the_step() -> None:
    """The changes that are not listed are one row."""
    a = [side(*((msgspec.structs.replace(MM, operator=f"op{i}"), 1_000) for i in range(40)))]
    b = [side(*((msgspec.structs.replace(MM, operator=f"op{i}"), 1_000 + 100 * i) for i in range(40)))]
    found = rows(tables(difference_answer(compared(a, b)))[1])
    assert [row["what"] for row in found[-2:]] == ["15 others", "step"]
    assert found[-2]["B - A"] == f"+{sum(range(15)) / 10:.1f} us"
    assert found[-1]["B - A"] == f"+{sum(range(40)) / 10:.1f} us"


def test_the_page_holds_what_the_terminal_shows_and_escapes_names() -> None:
    work = msgspec.structs.replace(MM, operator=HOSTILE)
    found = compared([side((work, 60), kernel=HOSTILE)] * 2, [side((work, 50)), side((work, 45))], ranks=(0, 1))
    written = "".join(as_page(difference_answer(found), product="trace", command="x"))
    assert "<script>alert" not in written
    told = Page(written).text.replace("\N{NO-BREAK SPACE}", " ")
    for table in tables(difference_answer(found)):
        for row in table.rows:
            assert all(str(cell) in told for cell in row if HOSTILE[:5] not in str(cell))
    assert all(sentence in told for sentence in remarks(found))
    assert [row["most, on rank"] for row in rows(tables(difference_answer(found))[1])] == ["-15 ns, 1", ""]
