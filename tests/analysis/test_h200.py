"""Traces of one H200: collectives that run as no NCCL kernel, and a compute-bound step. See ``h200/README.md``."""

from pathlib import Path

import pytest

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import TraceFigures
from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step
from refshard.report.trace.findings import findings

H200 = Path(__file__).parent / "h200"


def figures(name: str) -> TraceFigures:
    return analyse(H200 / f"{name}.json.gz").figures


def told(name: str) -> dict[str, str]:
    return {warning.code: warning.message for warning in figures(name).warnings}


def test_ddp_on_one_rank_reduces_all_its_parameters_without_a_kernel() -> None:
    timeline = read_timeline(H200 / "ddp.json.gz")
    assert collectives_per_step(timeline) == {2: (("all_reduce", 65, 4 * 1_235_814_400),)}
    assert {(one.dtype, one.group, one.start) for one in timeline.collectives} == {("Float", "0 [0]", None)}


def test_collectives_of_one_rank_need_no_kernel() -> None:
    assert told("ddp") == {}


def test_a_fake_backend_is_named_once() -> None:
    assert told("fake_rank0of8").keys() == {"no_steps", "fake_backend"}
    assert told("fake_rank0of8")["fake_backend"] == (
        "6 collectives were issued to torch's backend 'fake', which runs nothing: communication takes no time in this "
        "trace"
    )


def test_a_backend_that_does_not_record_groups_is_named() -> None:
    assert told("emulated_fsdp2") == {
        "no_process_group_metadata": "11 collectives do not name their process group (backend 'emulated' does not "
        "record it): ranks are matched by order alone"
    }
    assert all(one.bus_bandwidth for one in figures("emulated_fsdp2").collectives)


def test_a_compute_bound_trace_says_so_first() -> None:
    (finding,) = findings([figures("fake_rank0of8")])
    assert finding.lead == (
        "Compute-bound: compute takes 95 % of the trace, and matrix products run at 75 % of the GPU's peak. "
        "The largest loss is exposed copies into and out of collective buffers: 4.5 % of the trace (60.9 ms)."
    )


@pytest.mark.parametrize("name", ["ddp", "emulated_fsdp2"])
def test_other_steps_are_not_called_compute_bound(name: str) -> None:
    (finding,) = findings([figures(name)])
    assert finding.lead.startswith("The largest loss is ")
