"""Published claims, predicted: ratios of the closed forms' own figures."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refshard.errors import SpecError
from refshard.plan.estimate import estimate
from refshard.plan.space import Candidates
from refshard.quantities import GIB
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model
from tests.plan.made import job
from tests.report.printed import rows
from validation.closed_form import PredictedClaim, load_runs, predicted, predicted_claims
from validation.report import claim_as_object, claims_table, setting
from validation.schema import Source

pytestmark = pytest.mark.slow

FAST: dict[str, Any] = {
    "model": "llama3-8b", "gpus": 16, "hardware": "h100-sxm-80gb", "precision": "bf16", "seq_len": 4096, "dp_shard": 16,
    "microbatch": 2, "checkpointing": "none", "strategy": "fsdp2", "tokens_per_s_gpu": 5000.0, "reserved_gib": 60.0,
}  # fmt: skip
SLOW = {**FAST, "checkpointing": "full", "tokens_per_s_gpu": 4000.0, "reserved_gib": 30.0}


def of(*claims: dict[str, Any]) -> list[PredictedClaim]:
    given = {"title": "t", "source": "s", "clusters": {"h100-sxm-80gb": "dgx-h100"}, "claims": claims}
    return predicted_claims({"mine": msgspec.convert(given, Source)})


def claim(figure: str = "throughput", ratio: float = 1.25, **changes: Any) -> dict[str, Any]:
    return {"name": "a / b", "figure": figure, "ratio": ratio, "claimed": FAST, "baseline": SLOW, **changes}


def test_a_ratio_is_that_of_the_two_configurations_own_estimates() -> None:
    cluster = load_cluster("dgx-h100x2")
    rows = [job(strategy="fsdp2", dp_shard=16, microbatch=2, checkpointing=policy) for policy in ("none", "full")]
    found = estimate(load_model("llama3-8b"), cluster, 4096, Candidates.of(rows))
    (fast, slow), (large, small) = found.step_s.tolist(), (found.memory.peak / GIB).tolist()
    throughput, memory = of(claim(), claim("memory", 2.0))
    assert throughput.ratio == pytest.approx(slow / fast)
    assert memory.ratio == pytest.approx(large / small)
    assert throughput.claimed is not None
    assert throughput.claimed.figure("throughput") == pytest.approx(2 * 4096 / fast)
    assert (throughput.claimed.seconds, throughput.claimed.allocated_gib) == pytest.approx((fast, large))


def test_throughput_is_per_gpu_and_a_step_time_is_of_the_step() -> None:
    half = {**FAST, "gpus": 8, "dp_shard": 8, "seconds": 2.0}
    timed = {**FAST, "seconds": 2.0}
    speed = of(claim(ratio=1.0, claimed=half, baseline=timed))[0]
    time = of(claim("step time", 1.0, claimed=half, baseline=timed))[0]
    assert speed.ratio is not None
    assert time.ratio is not None
    assert speed.ratio == pytest.approx(1 / time.ratio)  # as many tokens on each GPU


def test_yafsdps_headline_is_predicted_as_its_runs_are() -> None:
    runs = load_runs()[0]
    seconds = {one.published.run: one.seconds for one in predicted(runs) if one.published.table == "yafsdp"}
    (found,) = (one for one in predicted_claims() if one.table == "yafsdp-headline")
    assert found.claim.claimed is not None
    assert found.claim.baseline is not None
    assert found.ratio == pytest.approx(seconds[found.claim.claimed] / seconds[found.claim.baseline])


def test_with_reductions_in_bf16_yafsdps_headline_would_be_as_published() -> None:
    """The cause that the claim names: both step times would then be as far off."""
    (found,) = (one for one in predicted_claims() if one.table == "yafsdp-headline")
    assert found.claimed is not None
    assert found.baseline is not None
    run = found.claimed.published
    own = msgspec.structs.replace(run.job.implementation, reduction="bf16")
    half = msgspec.structs.replace(run.job, implementation=own)
    (bf16,) = predicted([replace(run, job=half)])
    assert bf16.seconds / found.baseline.seconds == pytest.approx(found.claim.ratio, abs=0.01)
    assert bf16.seconds / run.seconds == pytest.approx(
        found.baseline.seconds / found.baseline.published.seconds, abs=0.01
    )


def test_simplefsdp_by_block_is_predicted_to_cost_what_fsdp2_does() -> None:
    """Both copy what they gather, beside compute. Their peak is at the loss, where neither has a block's parameters."""
    found = [one for one in predicted_claims() if one.table == "simplefsdp-torchtitan" and one.ratio is not None]
    assert {one.claimed.published.job.strategy for one in found if one.claimed} == {"simplefsdp-by-block"}
    assert {one.baseline.published.job.strategy for one in found if one.baseline} == {"fsdp2-tuned"}
    assert len(found) == 6
    for one in found:
        assert one.ratio == pytest.approx(1.0, abs=0.001)


def test_a_run_that_cannot_be_predicted_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(SpecError) as refused:
        of(claim(baseline={**SLOW, "checkpointing": "some matrices"}))
    assert str(refused.value) == (
        "claims mine: 'a / b': the baseline run cannot be predicted: checkpointing: some matrices; complete it"
    )


def test_a_claim_without_runs_is_listed_and_not_predicted() -> None:
    (found,) = of({"name": "a / b", "figure": "memory", "ratio": 0.7, "missing": "the batch", "setting": "8 GPUs"})
    assert (found.ratio, setting(found)) == (None, "8 GPUs")
    (row,) = rows(claims_table([found]))
    assert row == {
        "claim, and its setting": "a / b 8 GPUs", "figure": "memory", "published": "-30.0 %", "predicted": "",
        "cause of the difference": "Not predicted: the batch.",
    }  # fmt: skip
    (silent,) = of({"name": "a / b", "figure": "memory", "ratio": 0.7, "missing": "the batch"})
    assert setting(silent) == "not stated"
    assert claim_as_object(found)["claimed"] is None


def test_an_object_holds_both_runs_and_both_ratios() -> None:
    (found,) = of(claim(cause="because"))
    given = claim_as_object(found)
    assert (given["published_ratio"], given["predicted_ratio"], given["cause"]) == (1.25, found.ratio, "because")
    assert given["claimed"]["predicted"] / given["baseline"]["predicted"] == pytest.approx(found.ratio)
    assert (given["claimed"]["published"], given["baseline"]["published"]) == (5000, 4000)
    assert given["baseline"]["published_s"] == pytest.approx(2 * 4096 / 4000)
    assert given["setting"] == "llama3-8b, 16 GPUs, 4,096 tokens"


def test_a_setting_names_the_axes_beside_data_parallelism() -> None:
    split = {**FAST, "dp_shard": 4, "tp": 2, "cp": 2}
    (found,) = of(claim(ratio=1.0, claimed=split, baseline=split))
    assert setting(found) == "llama3-8b, 16 GPUs, TP 2, CP 2, 4,096 tokens"
