"""Published runs and claims: every file keeps the schema, and printed figures agree."""

from collections.abc import Iterator
from typing import Any

import pytest

from refshard.errors import SpecError
from refshard.flops import flops_per_token
from refshard.specs.model import load_model, parameter_count
from refshard.specs.reading import convert
from validation.schema import Claim, Run, Source, load_sources, model_of

TABLES = load_sources()
RUN: dict[str, Any] = {
    "model": "llama3-8b", "gpus": 8, "hardware": "h100-sxm-80gb", "precision": "bf16", "tp": 2, "seq_len": 8192,
    "global_batch": 128, "seconds": 10.0,
}  # fmt: skip


def runs() -> Iterator[tuple[Source, Run]]:
    """Runs without a script: all that is printed of them may be in a table's settings."""
    return ((table, run) for table in TABLES.values() for run in table.runs if run.script is None)


@pytest.mark.slow
def test_every_runs_model_has_dimensions() -> None:
    for table, run in runs():
        model = model_of(table, run)
        assert model.n_layers == (run.layers or model.n_layers)
        assert model.params == parameter_count(model)


def test_a_model_is_a_shape_before_a_preset_and_is_cut_to_its_layers() -> None:
    shape = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab": 256}
    given = {"title": "t", "source": "s", "shapes": {"llama3-8b": shape}, "runs": [{**RUN, "layers": 2}]}
    table = convert(given, Source, where="published x")
    model = model_of(table, table.runs[0])
    assert (model.dim, model.n_layers, model.source) == (64, 2, "2 layers of: s")
    assert model.params == parameter_count(model)
    preset = convert({**given, "shapes": {}}, Source, where="published x")
    cut = model_of(preset, preset.runs[0])
    assert (cut.dim, cut.n_layers) == (4096, 2)
    assert cut.params < load_model("llama3-8b").params


def test_a_model_that_nobody_describes_is_refused_with_what_is_missing() -> None:
    unknown = {"title": "t", "source": "s", "runs": [{**RUN, "model": "gpt-9"}]}
    table = convert(unknown, Source, where="published x")
    with pytest.raises(SpecError) as refused:
        model_of(table, table.runs[0])
    assert str(refused.value) == (
        "model 'gpt-9' of 't' must have a preset or a shape, got neither: its dim, n_layers, n_heads, n_kv_heads, "
        "ffn_dim, vocab are missing; add [shapes.'gpt-9'] to the table"
    )
    shape = {
        "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab": 256, "learned_positions": True,
    }  # fmt: skip
    learned = {**unknown, "shapes": {"gpt-9": shape}}
    assert model_of(convert(learned, Source, where="published x"), table.runs[0]).positions == 8192
    learned["runs"] = [{**RUN, "model": "gpt-9", "seq_len": None}]
    table = convert(learned, Source, where="published x")
    with pytest.raises(SpecError, match="seq_len must be given where positions are learned, got none; add it"):
        model_of(table, table.runs[0])


def test_names_of_megatrons_models_are_their_parameters() -> None:
    """All but the smallest's, 1.754 B, which is rounded down."""
    table = TABLES["megatron-lm"]
    named = {run.model: model_of(table, run).params / 1e9 for run in table.runs if run.model.startswith("gpt-")}
    assert len(named) == 9
    for name, billions in named.items():
        printed = name.removeprefix("gpt-").removesuffix("b")
        assert f"{billions:.{len(printed.partition('.')[2])}f}" == printed or name == "gpt-1.7b"
    assert named["gpt-1.7b"] == pytest.approx(1.75, abs=0.01)


def test_nemo_counts_by_convention_a() -> None:
    """So that its figures confirm the dimensions of its models."""
    table = TABLES["nemo"]
    found = [run for run in table.runs if run.tokens_per_s_gpu is not None]
    assert len(found) == 12
    for run in found:
        assert run.seq_len is not None
        assert run.tokens_per_s_gpu is not None
        counted = run.tokens_per_s_gpu * flops_per_token(model_of(table, run), run.seq_len, "A") / 1e12
        assert counted == pytest.approx(run.tflops_per_gpu, rel=2e-3)


def test_megatron_bridge_counts_by_convention_c() -> None:
    table = TABLES["megatron-bridge"]
    found = [run for run in table.runs if run.tokens_per_s_gpu is not None]
    assert len(found) == 89
    for run in found:
        assert run.seq_len is not None
        assert run.tokens_per_s_gpu is not None
        counted = run.tokens_per_s_gpu * flops_per_token(model_of(table, run), run.seq_len, "C") / 1e12
        assert counted == pytest.approx(run.tflops_per_gpu, rel=0.025)


def test_nvidias_recipes_count_llama_and_gpt_by_convention_a() -> None:
    """And Nemotron-4 15B since release 25.05: 3.85e14 a sequence."""
    table, peaks = TABLES["dgxc-benchmarking"], {"h100-sxm-80gb": 989, "gb200": 2450}
    seen = set()
    for run in table.runs:
        if run.model.startswith("nemotron") or run.mfu is None:
            continue
        assert run.seq_len is not None
        tokens_per_s_gpu = run.tokens_per_s_gpu or (run.tokens_per_s or 0) / run.gpus
        if not tokens_per_s_gpu:
            assert run.seconds is not None
            assert run.global_batch is not None
            tokens_per_s_gpu = run.global_batch * run.seq_len / run.seconds / run.gpus
        flops = tokens_per_s_gpu * flops_per_token(model_of(table, run), run.seq_len, "A") / 1e12
        peak = peaks[run.hardware] * (2 if run.precision == "fp8" else 1)
        assert flops / peak == pytest.approx(run.mfu, rel=0.02)
        seen.add(run.model)
    assert seen == {"gpt3-175b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-405b", "llama3.1-405b-16kv"}
    assert flops_per_token(load_model("nemotron4-15b"), 4096, "A") * 4096 == pytest.approx(3.85e14, rel=1e-3)


def test_llm_foundry_counts_by_convention_b() -> None:
    table = TABLES["llm-foundry"]
    peaks: dict[str, dict[str, float]] = {"a100": {"bf16": 312}, "h100": {"bf16": 989.4, "fp8": 1979}}
    ratios = []
    for run in table.runs:
        assert run.seq_len is not None
        assert run.precision is not None
        assert run.mfu is not None
        tokens_per_s_gpu = run.tokens_per_s_gpu or (run.tokens_per_s or 0) / run.gpus
        flops = tokens_per_s_gpu * flops_per_token(model_of(table, run), run.seq_len, "B")
        ratios.append(flops / 1e12 / peaks[run.hardware[:4]][run.precision] / run.mfu)
    assert len(ratios) == 242
    assert 0.995 < min(ratios) <= max(ratios) < 1.005


def test_each_run_stands_once() -> None:
    listed = list(runs())
    assert len({run for _, run in listed}) == len(listed) == 908


def test_figures_are_as_printed() -> None:
    paper = TABLES["llama3-paper"].runs
    assert [(run.gpus, run.tflops_per_gpu, run.mfu) for run in paper] == [
        (8192, 430.0, 0.43), (16384, 400.0, 0.41), (16384, 380.0, 0.38),
    ]  # fmt: skip
    scaling = {
        run.gpus: run.seconds for run in TABLES["dgxc-benchmarking"].runs
        if (run.model, run.strategy, run.precision, run.seq_len) == ("llama2-70b", "maxtext", "bf16", 4096)
    }  # fmt: skip
    assert scaling == {64: 6.999, 128: 7.072, 256: 7.153, 512: 7.091, 1024: 7.084, 2048: 7.066}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_s": 100_000.0}, "tokens_per_s must be what the run's other figures give, 104858, got 100000"),
        ({"tokens_per_s_gpu": 15_000.0}, "tokens_per_s_gpu must be what .* 13107.2, got 15000"),
        ({"seconds": None}, "a run must have a figure"),
        ({"tp": 3}, "tp x pp x cp must divide the 8 GPUs, got 3"),
        ({"microbatch": 0}, "microbatch must be >= 1"),
        ({"precision": "fp7"}, "precision"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"title": "t", "source": "s", "runs": [{**RUN, **changes}]}
    with pytest.raises(SpecError, match=message):
        convert(given, Source, where="published x")
    convert({**given, "runs": [{**RUN, "tokens_per_s": 104_000.0}]}, Source, where="published x")


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
    return convert({"title": "t", "source": "s", "claims": [claim]}, Source, where="claims mine").claims[0]


def refused(**changes: Any) -> str:
    given = {key: value for key, value in {**CLAIM, **changes}.items() if value is not None}
    with pytest.raises(SpecError) as error:
        read(given)
    return str(error.value)


def test_every_claim_that_ships_says_where_it_is_from_and_why_it_is_or_is_not_predicted() -> None:
    for table in TABLES.values():
        assert table.source
        for claim in table.claims:
            assert bool(claim.missing) == (claim.claimed is None)
            assert not (claim.missing and claim.cause), claim.name


def test_the_headlines_are_those_of_their_sources() -> None:
    """SimpleFSDP's abstract: 68.67 % more throughput, 28.54 % less memory. YaFSDP: up to 26 % less time."""
    paper = {claim.figure: claim.ratio for claim in TABLES["simplefsdp-paper"].claims}
    assert paper == {"throughput": 1 + 0.6867, "memory": pytest.approx(1 - 0.2854)}
    (yafsdp,) = TABLES["yafsdp-headline"].claims
    assert yafsdp.ratio == pytest.approx(1 - 0.2660)


def test_the_runs_of_yafsdps_headline_are_those_of_its_largest_speed_up() -> None:
    (claim,) = TABLES["yafsdp-headline"].claims
    runs = TABLES["yafsdp"].runs
    assert claim.claimed in runs
    assert claim.baseline in runs
    pairs = zip(runs[::2], runs[1::2], strict=True)
    gains = {(a.seconds or 0) / (b.seconds or 0): (a, b) for a, b in pairs if a.strategy == "yafsdp"}
    assert gains[min(gains)] == (claim.claimed, claim.baseline)


@pytest.mark.parametrize(("figure", "ratio"), [("throughput", 1.25), ("step time", 0.8), ("memory", 0.8)])
def test_a_claim_is_the_claimed_figure_over_the_baselines(figure: str, ratio: float) -> None:
    claim = read({**CLAIM, "figure": figure, "ratio": ratio})
    assert claim.claimed is not None
    assert claim.claimed.printed(claim.figure) == {"throughput": 5000, "step time": 2, "memory": 40}[figure]


def test_memory_is_what_is_reserved_or_else_what_is_allocated() -> None:
    allocated = {key: value for key, value in FAST.items() if key != "reserved_gib"} | {"allocated_gib": 30.0}
    claim = read({**CLAIM, "figure": "memory", "ratio": 0.6, "claimed": allocated})
    assert claim.claimed is not None
    assert claim.claimed.printed("memory") == 30.0


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
    with pytest.raises(SpecError, match="runs or claims must hold at least one, got none; leave the file out"):
        convert({"title": "t", "source": "s", "claims": []}, Source, where="claims mine")
