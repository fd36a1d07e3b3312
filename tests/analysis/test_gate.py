"""The gate's statistics: exact where theory is exact, and as rarely wrong as is claimed where noise decides."""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest
from scipy import stats

from refshard.analysis.gate import LogRatios, Verdict, effect_of, holm, is_suspect, judge, needs_fresh, smallest_visible
from refshard.analysis.rehearsal import Draw, Rehearsal, Rounds, noise_of, rehearse, relabelled
from refshard.specs.gate import TimeLimits

LIMITS = TimeLimits()
STAGES = (LIMITS.screen_rounds, LIMITS.confirm_rounds)


def rounds(seed: int, n: int, *, shift: float = 0.0, spread: float = 0.03) -> LogRatios:
    drawn = np.random.default_rng(seed).normal(shift, spread, n)
    return np.asarray(drawn, dtype=np.float64)


def test_the_estimate_is_the_median_of_pairwise_means() -> None:
    """Pairwise means of 0, 2 and 10: 0, 1, 2, 5, 6, 10."""
    assert math.log(effect_of(np.array([0.0, 2.0, 10.0])).ratio) == pytest.approx(3.5)


def test_an_example_of_a_textbook() -> None:
    """Hamilton's depression scores of nine patients before and after a drug (Hollander, Wolfe, Chicken, table 3.1)."""
    before = np.array([1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30])
    after = np.array([0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29])
    found = effect_of(before - after)
    assert found.p_slower == pytest.approx(0.019531, abs=1e-6)
    assert math.log(found.ratio) == pytest.approx(0.46)
    assert math.log(found.low) == pytest.approx(0.010)
    assert math.log(found.high) == pytest.approx(0.786)


@pytest.mark.parametrize("n", [6, 9, 16, 48])
def test_the_interval_holds_what_the_exact_test_does_not_reject(n: int) -> None:
    d = rounds(n, n, shift=0.01)
    found = effect_of(d)
    sides: list[tuple[float, Literal["greater", "less"], int]] = [(found.low, "greater", 1), (found.high, "less", -1)]
    for bound, alternative, inwards in sides:
        for step, rejected in ((1e-6, False), (-1e-6, True)):
            shifted = d - (math.log(bound) + inwards * step)
            assert (stats.wilcoxon(shifted, alternative=alternative).pvalue <= 0.025) == rejected


def test_too_few_rounds_have_no_interval_and_swapped_sides_invert() -> None:
    few = effect_of(rounds(0, 5))
    assert (few.low, few.high) == (0.0, math.inf)
    one, other = effect_of(rounds(1, 16)), effect_of(-rounds(1, 16))
    assert one.ratio == pytest.approx(1 / other.ratio)
    assert (one.low, one.p_slower) == pytest.approx((1 / other.high, other.p_faster))


def test_equal_times_are_no_evidence() -> None:
    found = effect_of(np.zeros(16))
    assert (found.ratio, found.low, found.high, found.p_slower, found.p_faster) == (1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="rounds must be finite"):
        effect_of(np.array([0.0, math.nan]))


def test_the_spread_of_a_normal_sample_is_its_standard_deviation() -> None:
    d = rounds(3, 400, spread=0.06)
    assert effect_of(d).spread == pytest.approx(stats.median_abs_deviation(d, scale="normal"), rel=1e-12)
    assert effect_of(d).spread == pytest.approx(0.06, rel=0.1)


def test_holm_rejects_step_by_step() -> None:
    """Limits for four hypotheses at 0.04: 0.01, 0.0133, 0.02, 0.04; the second fails, so the third does too."""
    assert holm({"a": 0.009, "b": 0.014, "c": 0.015, "d": 1.0}, 0.04) == {"a"}
    assert holm({"a": 0.009, "b": 0.013, "c": 0.019, "d": 0.04}, 0.04) == {"a", "b", "c", "d"}
    assert holm({}, 0.04) == set()


def test_verdicts_on_effects_that_are_beyond_doubt() -> None:
    drawn = {
        name: rounds(seed, 16, shift=shift, spread=spread)
        for seed, (name, shift, spread) in enumerate(
            [("slower", 0.08, 0.01), ("faster", -0.08, 0.01), ("same", 0.0, 0.01), ("wild", 0.0, 0.3)]
        )
    }
    screened = {name: effect_of(d) for name, d in drawn.items()}
    fresh = {name for name, effect in screened.items() if needs_fresh(effect, LIMITS)}
    assert fresh == {"slower", "faster", "wild"}
    confirmed = {
        name: effect_of(rounds(9, 48, shift=drawn[name].mean() if name != "wild" else 0.0, spread=drawn[name].std()))
        for name in fresh
    }
    found = judge(screened, confirmed, LIMITS)
    assert {name: verdict.verdict for name, verdict in found.items()} == {
        "slower": "regressed", "faster": "improved", "same": "pass", "wild": "inconclusive",
    }  # fmt: skip
    assert found["slower"].effect.rounds == 48, "fresh rounds decide"
    assert found["wild"].smallest_visible > LIMITS.visible > found["same"].smallest_visible


def test_fresh_rounds_clear_what_was_unclear_and_cannot_condemn_it() -> None:
    """No suspect, for its estimate is below 1 %, but with an interval beyond 5 %."""
    unclear = rounds(4, 16, shift=0.0, spread=0.1)
    effect = effect_of(unclear)
    assert not is_suspect(effect, LIMITS)
    assert effect.high > 1.05
    quiet, slow = rounds(5, 48, spread=0.02), rounds(6, 48, shift=0.2, spread=0.02)
    assert verdict_on(unclear, quiet) == "pass"
    assert verdict_on(unclear, slow) == "inconclusive"


def verdict_on(screened: LogRatios, confirmed: LogRatios) -> Verdict:
    """The gate's, in a gate of this case alone."""
    return judge({"case": effect_of(screened)}, {"case": effect_of(confirmed)}, LIMITS)["case"].verdict


def test_what_is_significant_but_small_passes() -> None:
    """2 % slower beyond doubt: under the limit of 2.5 %."""
    screened, confirmed = rounds(1, 16, shift=0.02, spread=0.002), rounds(2, 48, shift=0.02, spread=0.002)
    assert verdict_on(screened, confirmed) == "pass"


def test_fresh_rounds_are_for_those_that_need_them_and_for_all_of_them() -> None:
    slow = effect_of(rounds(1, 16, shift=0.1))
    with pytest.raises(ValueError, match=r"fresh rounds must be those of \['case'\], got \[\]"):
        judge({"case": slow}, {}, LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"screen_rounds": 3}, "screen_rounds must be >= 6, got 3"),
        ({"relevant": 0.0}, "relevant must lie between 0 and 1"),
        ({"visible": 0.02}, "screen_effect, relevant and visible must ascend"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimeLimits(**changes)  # type: ignore[arg-type]


def calm(drawn: np.random.Generator, n: int) -> LogRatios:
    """Ln of launches whose times scatter by 3 %."""
    return np.asarray(drawn.normal(0, 0.03, n), dtype=np.float64)


def harsh(drawn: np.random.Generator, n: int, start: float) -> LogRatios:
    """3 % noise on a machine that drifts by 4 % over a gate, where every twentieth launch takes 5 to 50 % longer."""
    drift = 0.02 * np.sin(start + np.linspace(0, 2 * math.pi, n))
    bursts = np.where(drawn.random(n) < 0.05, np.log1p(drawn.uniform(0.05, 0.5, n)), 0.0)
    return np.asarray(calm(drawn, n) + drift + bursts, dtype=np.float64)


def gates(*, is_harsh: bool, slower: float = 0.0, cases: int = 10) -> Draw:
    """A and B launched one after the other in each round; the first ``cases`` // 10 cases of B are ``slower``."""

    def draw(drawn: np.random.Generator) -> Mapping[str, Rounds]:
        found = {}
        for case in range(cases):
            stages = []
            for n in STAGES:
                launches = harsh(drawn, 2 * n, drawn.uniform(0, 6)) if is_harsh else calm(drawn, 2 * n)
                pairs = launches.reshape(n, 2)
                swapped = drawn.random(n) < 0.5
                d = np.where(swapped, pairs[:, 0] - pairs[:, 1], pairs[:, 1] - pairs[:, 0])
                stages.append(d + (math.log1p(slower) if case == 0 else 0.0))
            found[f"case {case}"] = (stages[0], stages[1])
        return found

    return draw


@pytest.mark.parametrize(
    "scale", [pytest.param(5, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full)], ids=["a fifth", "all"]
)
@pytest.mark.parametrize("is_harsh", [False, True], ids=["3 % noise", "bursts and drift"])
def test_false_alarms_are_rare_and_a_slow_down_of_5_percent_is_found(is_harsh: bool, scale: int) -> None:
    """The aims: at most 4 failing gates of 1,000 without a change, and 95 % of slow-downs of 5 % found; or a fifth."""
    nothing = rehearse(gates(is_harsh=is_harsh), LIMITS, gates=1000 // scale)
    planted = rehearse(gates(is_harsh=is_harsh, slower=0.05), LIMITS, gates=300 // scale)
    print(f"\n{nothing}\n{planted}")
    assert nothing.failing_gates <= max(4 // scale, 1)
    assert count(nothing, "inconclusive") <= 0.02 * 10 * nothing.gates
    assert planted.failing_gates >= 0.95 * planted.gates


def count(found: Rehearsal, verdict: Verdict) -> int:
    """Cases of all gates that got ``verdict``."""
    return sum(of_case.get(verdict, 0) for of_case in found.verdicts.values())


@pytest.mark.slow
def test_labels_that_are_permuted_fail_seldom_and_show_what_was_planted() -> None:
    recorded = {f"case {seed}": rounds(seed, 150) for seed in range(4)}
    nothing = rehearse(relabelled(recorded, LIMITS), LIMITS, gates=50)
    planted = rehearse(relabelled(recorded, LIMITS, slower=dict.fromkeys(recorded, 0.08)), LIMITS, gates=20)
    assert count(nothing, "regressed") == 0
    assert count(planted, "regressed") == 4 * planted.gates
    with pytest.raises(ValueError, match="case 0: a gate needs 64 rounds, 63 are recorded; record more"):
        relabelled({"case 0": rounds(0, 63)}, LIMITS)


@pytest.mark.slow
def test_the_smallest_visible_effect_is_found_as_often_as_it_says() -> None:
    """Planted at a spread of 6 %, which makes it the decisive stage's affair, in a gate of one case."""
    planted = smallest_visible(0.06, LIMITS, cases=1)

    def draw(drawn: np.random.Generator) -> Mapping[str, Rounds]:
        screen, confirm = (drawn.normal(math.log1p(planted), 0.06, n) for n in STAGES)
        return {"case": (np.asarray(screen), np.asarray(confirm))}

    found = rehearse(draw, LIMITS, gates=300)
    error = math.sqrt(0.95 * 0.05 / found.gates)
    assert found.failing_gates / found.gates == pytest.approx(0.95, abs=3 * error)
    assert smallest_visible(effect_of(rounds(0, 1)).spread, LIMITS, cases=1) == math.inf


@pytest.mark.slow
def test_noise_tells_of_alarms_and_of_a_slow_down_in_one_case_at_a_time() -> None:
    """A spread of 3 % finds 8 % always, one of 40 % seldom; the recorded effect is shown, for labels hide it."""
    recorded = {"calm": rounds(0, 100, shift=0.02), "wild": rounds(1, 100, spread=0.4)}
    found = noise_of(recorded, LIMITS, launches=200, gates=40, planted=0.08)
    assert (found.launches, found.gates, found.failing_gates) == (200, 40, 0)
    calm, wild = found.cases["calm"], found.cases["wild"]
    assert (calm.tried, calm.found, calm.false_alarms, calm.inconclusive) == (20, 20, 0, 0)
    assert wild.found < 10
    assert wild.inconclusive > 30
    assert 1.01 < calm.low < calm.ratio < calm.high < 1.03
    assert calm.smallest_visible < 0.05 < wild.smallest_visible
