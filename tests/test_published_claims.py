"""Published claims: every file keeps the schema, and a claim agrees with the figures of its runs."""

from typing import Any

import pytest

from refshard.errors import SpecError
from refshard.specs.published_claims import Claim, ClaimTable, figure_of, load_claims
from refshard.specs.published_parallel import load_parallel
from refshard.specs.reading import convert

FAST: dict[str, Any] = {
    "model": "llama3-8b", "gpus": 8, "hardware": "h100-sxm-80gb", "strategy": "fsdp2", "tokens_per_s_gpu": 5000.0,
    "seconds": 2.0, "reserved_gib": 40.0,
}  # fmt: skip
SLOW = {**FAST, "tokens_per_s_gpu": 4000.0, "seconds": 2.5, "reserved_gib": 50.0}
CLAIM: dict[str, Any] = {
    "name": "fast / slow",
    "figure": "throughput",
    "ratio": 1.25,
    "claimed": FAST,
    "baseline": SLOW,
}


def read(claim: dict[str, Any]) -> Claim:
    return convert({"title": "t", "source": "s", "claims": [claim]}, ClaimTable, where="claims mine").claims[0]


def refused(**changes: Any) -> str:
    given = {key: value for key, value in {**CLAIM, **changes}.items() if value is not None}
    with pytest.raises(SpecError) as error:
        read(given)
    return str(error.value)


def test_every_claim_that_ships_says_where_it_is_from_and_why_it_is_or_is_not_predicted() -> None:
    for table in load_claims().values():
        assert table.source
        for claim in table.claims:
            assert bool(claim.missing) == (claim.claimed is None)
            assert not (claim.missing and claim.cause), claim.name


def test_the_headlines_are_those_of_their_sources() -> None:
    """SimpleFSDP's abstract: 68.67 % more throughput, 28.54 % less memory. YaFSDP: up to 26 % less time."""
    tables = load_claims()
    paper = {claim.figure: claim.ratio for claim in tables["simplefsdp-paper"].claims}
    assert paper == {"throughput": 1 + 0.6867, "memory": pytest.approx(1 - 0.2854)}
    (yafsdp,) = tables["yafsdp"].claims
    assert yafsdp.ratio == pytest.approx(1 - 0.2660)


def test_the_runs_of_yafsdps_headline_are_those_of_its_largest_speed_up() -> None:
    (claim,) = load_claims()["yafsdp"].claims
    runs = load_parallel()["yafsdp"].runs
    assert claim.claimed in runs
    assert claim.baseline in runs
    pairs = zip(runs[::2], runs[1::2], strict=True)
    gains = {(a.seconds or 0) / (b.seconds or 0): (a, b) for a, b in pairs if a.strategy == "yafsdp"}
    assert gains[min(gains)] == (claim.claimed, claim.baseline)


@pytest.mark.parametrize(("figure", "ratio"), [("throughput", 1.25), ("step time", 0.8), ("memory", 0.8)])
def test_a_claim_is_the_claimed_figure_over_the_baselines(figure: str, ratio: float) -> None:
    claim = read({**CLAIM, "figure": figure, "ratio": ratio})
    assert claim.claimed is not None
    assert figure_of(claim.claimed, claim.figure) == {"throughput": 5000, "step time": 2, "memory": 40}[figure]


def test_memory_is_what_is_reserved_or_else_what_is_allocated() -> None:
    allocated = {key: value for key, value in FAST.items() if key != "reserved_gib"} | {"allocated_gib": 30.0}
    claim = read({**CLAIM, "figure": "memory", "ratio": 0.6, "claimed": allocated})
    assert claim.claimed is not None
    assert figure_of(claim.claimed, "memory") == 30.0


def test_a_claim_that_its_runs_contradict_is_refused() -> None:
    assert "ratio must be what the runs' figures give, 1.25, got 1.3; check the source" in refused(ratio=1.3)
    assert read({**CLAIM, "ratio": 1.26}).ratio == 1.26
    silent = {key: value for key, value in FAST.items() if key != "reserved_gib"}
    assert "both runs must have the claim's figure, memory, got [None, 50.0]" in refused(
        figure="memory", claimed=silent
    )


def test_a_claim_has_two_runs_or_says_what_is_missing() -> None:
    rule = "must have a claimed and a baseline run, or say what is missing, got"
    assert f"{rule} 1 of 2 runs" in refused(baseline=None)
    assert f"{rule} 0 of 2 runs and ''" in refused(claimed=None, baseline=None)
    assert f"{rule} 1 of 2 runs and 'the batch'" in refused(baseline=None, missing="the batch")
    assert f"{rule} 2 of 2 runs and 'the batch'" in refused(missing="the batch")
    missing = {"name": "n", "figure": "memory", "ratio": 0.5, "missing": "the batch", "setting": "8 GPUs"}
    assert read(missing).setting == "8 GPUs"
    assert "setting must be empty where runs are given, got '8 GPUs'" in refused(setting="8 GPUs")


def test_wrong_keys_figures_and_empty_tables_are_refused() -> None:
    assert "figures" in refused(figures="memory")
    assert "speed" in refused(figure="speed")
    assert "ratio must be > 0 and finite, got 0" in refused(ratio=0.0)
    with pytest.raises(SpecError, match="claims must hold at least one, got none; leave the file out"):
        convert({"title": "t", "source": "s", "claims": []}, ClaimTable, where="claims mine")
