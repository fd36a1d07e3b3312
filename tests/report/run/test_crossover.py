"""Step time relative to DDP over tokens per rank: known answers."""

from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.records import Run
from refshard.report.run.curves import crossovers
from tests.report.printed import rows
from tests.report.runs import CASES, run


def made(times: dict[int, dict[str, float]]) -> Run:
    """A run of DDP and others with these step times, s, by sequence length and strategy; its batch is 8."""
    base, cases = run(failed=False), []
    for seq_len, seconds in times.items():
        timed = [replace(case, step_time=seconds[case.strategy]) for case in CASES if case.strategy in seconds]
        for record in run(timed, failed=False).launches:
            case = msgspec.structs.replace(record.case, seq_len=seq_len)
            cases.append(msgspec.structs.replace(record, case=case, spec_hash=case.hash))
    return msgspec.structs.replace(base, launches=tuple(cases))


def test_curves_are_ratios_over_the_tokens_of_a_rank() -> None:
    times = {64: {"ddp": 0.1, "fsdp2": 0.2, "refshard-yafsdp": 0.12}, 256: {"ddp": 0.3, "fsdp2": 0.36}}
    (found,) = crossovers(gather(made({**times, 512: {"ddp": 0.6, "fsdp2": 0.45}})))
    drawn = {trace["name"]: (trace["x"], trace["y"]) for trace in found.chart.figure["data"]}
    assert drawn.keys() == {"fsdp2", "ddp"}, "one count of tokens makes no curve"
    assert drawn["fsdp2"][0] == [256, 1024, 2048]
    assert drawn["fsdp2"][1] == pytest.approx([2, 1.2, 0.75], rel=1e-3)
    assert drawn["ddp"] == ([256, 2048], [1, 1])
    assert found.chart.alternative == (
        "Step time relative to ddp: fsdp2 2.00 at 256 tokens per rank, 0.75 at 2,048 tokens per rank (faster at 2,048)."
    )
    assert [row["tokens per rank"] for row in rows(found.table)] == ["256", "1,024", "2,048"]
    assert [row["peak memory / ddp"] for row in rows(found.table)] == ["0.68"] * 3
    assert len(found.cases) == 3


def test_without_ddp_or_with_one_sequence_length_there_is_none() -> None:
    assert crossovers(gather(run())) == ()
    assert crossovers(gather(made({64: {"fsdp2": 0.2}, 256: {"fsdp2": 0.3}}))) == ()
