"""The lower bound of a step against values worked out by hand, and the overlap efficiency of cases."""

from dataclasses import replace

import pytest

from refshard.analysis.efficiency import link_bytes, lower_bound
from refshard.analysis.evidence import gather
from refshard.records import CollectiveCount, Run
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.specs.suite import NetworkSpec
from tests.report.runs import CASES, on_hosts, run, spec, with_record

MINI = load_model("llama-mini")
EMBEDDING = 8192 * 512 * 4
BLOCK = (512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1280 + 2 * 512) * 4
WHOLE = 2 * EMBEDDING + 8 * BLOCK + 512 * 4  # bytes of 30,417,408 parameters
YAFSDP = 2 * WHOLE + 6 * BLOCK
"""Bytes that are gathered and reduced in a step: the two last blocks stay in the ring for backward."""


def counted(**sizes: int) -> tuple[CollectiveCount, ...]:
    return tuple(CollectiveCount(op=op, count=3, bytes=size) for op, size in sizes.items())


def network(rate: str, hosts: int = 2) -> NetworkSpec:
    return NetworkSpec(hosts=hosts, rate=rate)


def bound(issued: tuple[CollectiveCount, ...], rate: str, reference: float = 2.2, **changes: object) -> float | None:
    return lower_bound(spec("ddp").changed(**changes), MINI, issued, reference, network(rate))


def test_the_sizes_are_those_of_the_model() -> None:
    assert WHOLE == MINI.params * 4 == 121_669_632


@pytest.mark.parametrize(
    ("issued", "world_size", "hosts", "expected"),
    [
        (counted(all_reduce=1200), 2, 2, 1200),
        (counted(all_reduce=1200), 4, 4, 1800),
        (counted(all_reduce=1200), 4, 2, 1200),
        (counted(all_gather=800, reduce_scatter=400), 2, 2, 600),
        (counted(all_gather=800, reduce_scatter=400), 4, 4, 900),
        # All of an exchange goes to others.
        (counted(all_gather=800, all_to_all=200), 2, 2, 600),
        (counted(all_to_all=600), 2, 2, 600),
        (counted(all_to_all=900), 4, 4, 900),
        (counted(all_to_all=900), 4, 2, 600),
        (counted(barrier=7), 2, 2, 0),
        ((), 2, 2, 0),
    ],
)
def test_bytes_that_pass_a_link(
    issued: tuple[CollectiveCount, ...], world_size: int, hosts: int, expected: float
) -> None:
    assert link_bytes(issued, world_size, hosts) == pytest.approx(expected)


def test_on_a_fast_link_the_critical_path_bounds_a_step() -> None:
    """At 2 Gbit/s, 2.2 s of compute over 2 ranks, and half of the embedding before and after it."""
    edges = EMBEDDING / 2 / 250e6
    assert edges == pytest.approx(0.0336, abs=1e-4)
    yafsdp = counted(all_to_all=YAFSDP // 2)
    assert YAFSDP // 2 == 154_712_064
    assert bound(yafsdp, "2gbit") == pytest.approx(1.1 + 2 * edges)
    assert bound(counted(all_reduce=WHOLE), "2gbit") == pytest.approx(1.1 + 2 * edges), "reduced once, but two ways"


def test_on_a_slow_link_the_bytes_bound_a_step() -> None:
    assert bound(counted(all_to_all=YAFSDP // 2), "500mbit") == pytest.approx(154_712_064 / 62.5e6)
    assert bound(counted(all_gather=YAFSDP - WHOLE, all_to_all=WHOLE // 2), "500mbit") == pytest.approx(
        154_712_064 / 62.5e6
    )
    assert bound(counted(all_reduce=WHOLE), "500mbit") == pytest.approx(121_669_632 / 62.5e6)


def test_inference_has_no_edges_and_may_be_bound_by_compute_alone() -> None:
    assert bound(counted(all_gather=WHOLE), "2gbit", workload="inference") == pytest.approx(1.1)
    assert bound(counted(all_gather=WHOLE), "2gbit", 0.1, workload="inference") == pytest.approx(WHOLE / 2 / 250e6)


def test_with_muon_no_bound_is_taken_from_bytes_that_may_stay_on_their_rank() -> None:
    issued = counted(all_gather=800, all_to_all=200)
    assert bound(issued, "1gbit") is not None
    assert bound(issued, "1gbit", optimizer="muon") is None
    assert bound(issued[:1], "1gbit", optimizer="muon") == bound(issued[:1], "1gbit")


def test_what_does_not_communicate_has_no_bound() -> None:
    assert bound((), "2gbit") is None
    assert bound(counted(all_reduce=WHOLE), "2gbit", gpus=1) is None


SLOW = [replace(CASES[0], step_time=0.8), replace(CASES[1], step_time=0.6), replace(CASES[-1], step_time=0.5)]
EIGHT = network("8gbit")
BOUND = 0.8 / 2 + EMBEDDING / 1e9
"""Of both cases of two ranks over 8 Gbit/s, which is 10^9 bytes a second: their few bytes take 0.04 s at most."""


def efficiencies(made: Run) -> dict[str, float | None]:
    return {case.strategy: case.metrics["overlap_efficiency"] for case in gather(made).cases}


def test_cases_of_a_run_over_a_known_link_have_it() -> None:
    found = efficiencies(on_hosts(run(SLOW, failed=False), EIGHT))
    assert found.pop("single") is None
    assert found == pytest.approx({"ddp": BOUND / 0.6, "refshard-yafsdp": BOUND / 0.5}, rel=1e-4)


def test_unknown_links_references_and_models_leave_it_out() -> None:
    assert set(efficiencies(run(SLOW, failed=False)).values()) == {None}
    assert set(efficiencies(on_hosts(run(SLOW[1:], failed=False), EIGHT)).values()) == {None}
    made = on_hosts(run(SLOW, rounds=1, failed=False), EIGHT)
    for place, record in enumerate(made.launches):
        case: Case = record.case.changed(model="not-a-preset")
        made = with_record(made, place, case=case)
    assert set(efficiencies(made).values()) == {None}


def test_a_case_without_proof_has_none() -> None:
    made = with_record(on_hosts(run(SLOW, rounds=1, failed=False), EIGHT), 1, proof=None)
    assert efficiencies(made)["ddp"] is None
