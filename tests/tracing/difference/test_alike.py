"""Whether two jobs are like for like, by jobs whose devices, sizes and shapes are known."""

import msgspec
import pytest

from refshard.tracing.attribution import Attribution, Owner, Work
from refshard.tracing.difference import Unlike, unlike
from refshard.tracing.figures import TraceFigures
from tests.report import traces

BASE = traces.figures(traces.gpu(layers=2, steps=1))


def figures(device: str = "H100", world_size: int | None = 8) -> list[TraceFigures]:
    return [msgspec.structs.replace(BASE, device=device, world_size=world_size)]


def calls(*rows: tuple[str, str, int]) -> list[Attribution]:
    """A step of compute: operator, shapes and nanoseconds."""
    works = [(Work(kind="compute", operator=operator, dims=dims), ns) for operator, dims, ns in rows]
    owners = tuple(Owner(work=work, ns=ns, count=1) for work, ns in works)
    return [Attribution(step_ns=(sum(ns for _, ns in works),), owners=owners)]


SAME = calls(("aten::mm", "[8,4]x[4,2]", 60), ("aten::add", "[8,2]x[8,2]", 40))


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (figures(), figures(), ()),
        (figures(), figures("MI300X"), (Unlike(what="device", a="H100", b="MI300X"),)),
        (figures(), figures(world_size=2), (Unlike(what="world size", a="8", b="2"),)),
        (figures(), figures(world_size=None), ()),
        (figures("gpu"), figures(), ()),  # a trace without its device's name
        (figures() + figures("H200"), figures(), (Unlike(what="device", a="H100, H200", b="H100"),)),
    ],
)
def test_devices_and_sizes_are_compared_where_both_are_known(
    a: list[TraceFigures], b: list[TraceFigures], found: tuple[Unlike, ...]
) -> None:
    assert unlike((a, b), (SAME, SAME)) == found


BATCH = Unlike(what="batch size", a="aten::mm [8,4]x[4,2]", b="aten::mm [16,4]x[4,2]")


@pytest.mark.parametrize(
    ("b", "found"),
    [
        (calls(("aten::mm", "[16,4]x[4,2]", 60), ("aten::add", "[16,2]x[16,2]", 40)), (BATCH,)),
        (
            calls(("aten::mm", "[8,6]x[6,3]", 60), ("aten::add", "[8,3]x[8,3]", 40)),
            (Unlike(what="input shapes", a="aten::mm [8,4]x[4,2]", b="aten::mm [8,6]x[6,3]"),),
        ),
        # Most time is in shapes that both have.
        (calls(("aten::mm", "[8,4]x[4,2]", 60), ("aten::add", "[16,2]x[16,2]", 40)), ()),
        # An operator that replaces another is what is to be measured.
        (calls(("fused", "[1,1]", 90), ("aten::add", "[8,2]x[8,2]", 10)), ()),
        (
            calls(("fused", "[1,1]", 900), ("aten::mm", "[8,4]x[4,2]", 60), ("aten::add", "[16,2]x[16,2]", 10)),
            (),
        ),
        (calls(("aten::mm", "", 60), ("aten::add", "", 40)), ()),
        (calls(), ()),
    ],
)
def test_shapes_are_compared_by_the_time_in_operators_that_both_call(
    b: list[Attribution], found: tuple[Unlike, ...]
) -> None:
    assert unlike((figures(), figures()), (SAME, b)) == found
