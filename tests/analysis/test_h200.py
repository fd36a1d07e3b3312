"""Traces of one H200: collectives that run as no NCCL kernel, and a compute-bound step. See ``h200/README.md``."""

from pathlib import Path

from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step

H200 = Path(__file__).parent / "h200"


def test_ddp_on_one_rank_reduces_all_its_parameters_without_a_kernel() -> None:
    timeline = read_timeline(H200 / "ddp.json.gz")
    assert collectives_per_step(timeline) == {2: (("all_reduce", 65, 4 * 1_235_814_400),)}
    assert {(one.dtype, one.group, one.start) for one in timeline.collectives} == {("Float", "0 [0]", None)}
