"""Published results beside cases of the same configuration."""

from typing import Any

import msgspec

from refshard.analysis.evidence import gather
from refshard.records import Run
from refshard.report.run.published import published
from tests.report.runs import CASES, run

LLAMA = {"model": "llama2-7b", "world_size": 64, "global_batch": 64, "seq_len": 2048}
"""YaFSDP's first row: 0.81 s, and 0.9 s of FSDP1, on 8 nodes of 8."""


def configured(**changes: Any) -> Run:
    made = run(CASES[1:2], rounds=1, failed=False, fidelity="simulated")
    case = msgspec.structs.replace(made.launches[0].case, **changes)
    metrics = {**made.launches[0].metrics, "step_time_s": 0.9, "tokens_per_s_gpu": 2048 / 0.9}
    record = msgspec.structs.replace(made.launches[0], case=case, metrics=metrics, step_times_s=((0.9,),))
    return msgspec.structs.replace(made, launches=(record,))


def test_what_matches_stands_beside_it_and_says_how_it_differs() -> None:
    found = published(gather(configured(**LLAMA)))
    rows = found.table.to_dict("records")
    assert [(row["published"], row["our speed / published"]) for row in rows] == [
        ("yafsdp: 810 ms", "0.90"), ("fsdp1: 900 ms", "1.00"),
    ]  # fmt: skip
    assert {(row["our dtype"], row["its dtype"], row["its hardware"]) for row in rows} == {
        ("fp32", "bf16", "yafsdp-a100")
    }
    assert len(found.cases) == 2
    assert found.sources[0].startswith("yandex/YaFSDP")


def test_a_policy_that_cases_do_not_have_matches_nothing() -> None:
    found = published(gather(configured(model="llama3-8b", world_size=8, global_batch=16, seq_len=8192)))
    assert found.table.empty, "torchtitan's rows checkpoint selectively"


def test_one_difference_is_no_match() -> None:
    for change in (
        {"world_size": 32, "global_batch": 32},
        {"seq_len": 1024},
        {"checkpointing": "full"},
        {"microbatches": 1, "model": "llama2-13b"},
    ):
        found = published(gather(configured(**{**LLAMA, **change})))
        assert found.table.empty
        assert found.sentence.startswith("No case has the configuration of one of ")
