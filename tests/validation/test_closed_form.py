"""Published runs: which are predicted, how far off, and that the error bars which ship say so."""

import tomllib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from math import log
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest

from refshard import resources
from refshard.plan.estimate import estimate
from refshard.plan.plan import kind_of
from refshard.plan.space import Candidates
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Implementation, Job
from validation import fit
from validation.closed_form import Published, load_runs, predicted, published_of
from validation.schema import Run, Source, load_sources, model_of


@cache
def runs() -> list[Published]:
    return load_runs()[0]


@cache
def seconds() -> list[float]:
    """Predicted step times, in the order of the runs."""
    return [one.seconds for one in predicted(runs())]


def errors(half: str) -> list[tuple[Published, float]]:
    return [(run, s / run.seconds - 1) for run, s in zip(runs(), seconds()) if run.half == half]


@pytest.mark.processes
def test_held_out_step_times_are_predicted_within_5_percent_in_the_median() -> None:
    found = [abs(error) for run, error in errors("held out") if run.model.experts is None]
    assert len(found) > 250
    assert median(found) <= 0.05
    assert sorted(found)[int(0.9 * len(found))] <= 0.15


@pytest.mark.processes
def test_mixtures_of_experts_are_as_far_off_as_the_docs_say() -> None:
    """The aim of 6 % in the median is missed, 15 % for nine of ten, too; docs/explanation/plan.md says why."""
    for half, middle, most in (("fit", 0.055, 0.14), ("held out", 0.095, 0.25)):
        found = sorted(abs(error) for run, error in errors(half) if run.model.experts is not None)
        assert len(found) >= 58
        assert median(found) <= middle
        assert found[int(0.9 * (len(found) - 1))] <= most


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("lora-batch4-a100x1", 0.04),
        ("lora-batch8-a100x1", 0.03),
        ("qlora-batch4-a100x1", 0.18),
        ("qlora-batch8-a100x1", 0.15),
        ("lora-fsdp1-batch2-a100x2", 0.16),
        ("lora-fsdp1-batch4-a100x2", 0.08),
    ],
)
def test_published_adapters_are_as_fast_as_the_docs_say(name: str, error: float) -> None:
    """On one A100 or two, by transformers and PEFT. QLoRA ran in autocast, which casts more than the closed form."""
    source = load_sources()["fms-acceleration"]
    run = next(one for one in source.runs if one.name == f"mistral-7b-{name}-2025-02")
    assert run.script is not None
    assert run.script.adapter is not None
    adapter = run.script.adapter
    job = Job(
        strategy="single" if run.gpus == 1 else "fsdp1", model=run.model, gpus=run.gpus, seq_len=4096,
        global_batch=(run.microbatch or 1) * run.gpus, precision="bf16",
        checkpointing="full", tuning="qlora" if run.script.quantised else "lora", lora_rank=adapter.rank or 8,
        lora_targets=",".join(adapter.targets),
        implementation=Implementation(fused_norms=False),
    )  # fmt: skip
    on = load_cluster("dgx-a100").of_world_size(run.gpus)
    found = estimate(model_of(source, run), on, 4096, Candidates.of([job]))
    speed = job.global_batch * 4096 / found.step_s[0] / run.gpus
    assert speed / (run.tokens_per_s_gpu or 0) - 1 == pytest.approx(error, abs=0.01)


def test_memory_of_simumaxs_mixtures_is_predicted_within_2_percent() -> None:
    found = [one.memory_error for one in predicted(runs()) if one.published.model.experts and one.memory_error]
    assert len(found) == 12
    assert max(map(abs, found)) < 0.02


@pytest.mark.processes
def test_no_source_is_predicted_badly_as_a_whole() -> None:
    """Constants are fitted on all sources together; none may be paid for by another."""
    of: dict[str, list[float]] = defaultdict(list)
    for run, error in errors("held out"):
        if run.model.experts is None:
            of[run.table].append(abs(error))
    assert {table: median(found) for table, found in of.items() if median(found) > 0.15} == {}


@pytest.mark.processes
def test_the_spread_that_ships_is_that_of_the_profiles_as_they_are() -> None:
    """If not: ``python -m validation.fit --write-spread``."""
    expected = tomllib.loads(fit.spread_text([*errors("fit"), *errors("held out")]))["kinds"]
    shipped = tomllib.loads(resources.spread().read_text())["kinds"]
    assert shipped.keys() == expected.keys()
    for kind, figures in expected.items():
        assert shipped[kind] == pytest.approx(figures, abs=1.01e-4), kind
    assert sum(figures["count"] for figures in shipped.values()) == len(errors("held out"))
    kinds = {kind_of(run.job, run.model, run.cluster.accelerator) for run, _ in errors("held out")}
    assert kinds == shipped.keys()


def test_each_source_counts_the_same_in_error_bars() -> None:
    many, one = np.array([0.0, 0.01, 0.01, 0.01, 0.02]), np.array([0.2])
    assert [fit.weighted([many, one], part) for part in (0.1, 0.4, 0.6, 0.9)] == [0.0, 0.01, 0.2, 0.2]


@pytest.mark.slow
def test_a_setting_is_in_one_half_as_a_whole_and_halves_are_about_as_large() -> None:
    halves: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for run in runs():
        halves[run.setting].add(run.half)
    assert all(len(found) == 1 for found in halves.values())
    (fitted, held) = ([next(iter(h)) for h in halves.values()].count(half) for half in ("fit", "held out"))
    assert 0.35 < held / (fitted + held) <= 0.5


def test_runs_that_differ_only_in_gpus_release_or_file_are_one_setting() -> None:
    table, run = complete()
    one = made(table, run)
    assert isinstance(one, Published)
    same = {"gpus": 32, "global_batch": 128, "seconds": 9.0, "where": "another"}
    assert made(table, {**run, **same}).setting == one.setting  # type: ignore[union-attr]
    for change in (
        {"precision": "fp8"},
        {"tp": 4},
        {"microbatch": 2},
        {"seq_len": 4096},
        {"checkpointing": "full"},
    ):
        assert made(table, {**run, **change}).setting != one.setting  # type: ignore[union-attr]


@pytest.mark.slow
def test_every_run_is_predicted_or_counted_with_a_reason() -> None:
    found, counts = load_runs()
    for name, table in load_sources().items():
        here = [run for run in found if run.table == name]
        left = {reason: count for (of, reason), count in counts.items() if of == name}
        assert len(here) + sum(left.values()) == sum(run.script is None for run in table.runs)
        assert all(left)
    assert sum(counts.values()) == 106, "fewer or more sources leave something out"


def test_what_a_predicted_run_does_not_say_its_table_assumes() -> None:
    tables = load_sources()
    for one in runs():
        run, assumed = one.run, tables[one.table].assumed
        for field in ("seq_len", "checkpointing", "precision", "strategy"):
            assert getattr(run, field) or assumed.get(field), (one.table, field)
        if run.pp > 1:
            assert run.interleave or assumed.get("interleave"), one.table
        assert one.job.gpus == run.gpus
        assert one.cluster.world_size == run.gpus
        if run.global_batch and run.microbatch:
            assert one.job.global_batch == run.global_batch


def complete() -> tuple[dict[str, Any], dict[str, Any]]:
    """A table, and a run that says everything."""
    table = {"title": "t", "source": "s", "clusters": {"h100-sxm-80gb": "dgx-h100"}}
    run = {
        "model": "llama3-8b", "gpus": 16, "hardware": "h100-sxm-80gb", "precision": "bf16", "seq_len": 8192,
        "tp": 2, "pp": 2, "interleave": 2, "microbatch": 1, "global_batch": 64, "checkpointing": "none",
        "strategy": "zero1", "seconds": 10.0,
    }  # fmt: skip
    return table, run


def made(table: Mapping[str, Any], run: Mapping[str, Any]) -> Published | str:
    given = msgspec.convert({**table, "runs": [run]}, Source)
    return published_of("made", given, given.runs[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": "abacus"}, "no cluster profile for abacus"),
        ({"seq_len": None}, "the sequence length is not stated"),
        ({"checkpointing": None}, "checkpointing: not stated"),
        ({"checkpointing": "some matrices"}, "checkpointing: some matrices"),
        ({"precision": None}, "precision: not stated"),
        ({"precision": "fp8-rowwise"}, "precision: fp8-rowwise"),
        ({"checkpointing": "every-0"}, "checkpointing: every-0"),
        ({"strategy": ""}, "no closed form of a strategy that is not stated"),
        ({"strategy": "psgd"}, "no closed form of psgd"),
        ({"dp_shard": 3}, "3 shards do not divide 4 data-parallel ranks"),
        ({"global_batch": None}, "the batch is not stated"),
        ({"microbatch": None}, "the batch is not stated"),
        ({"global_batch": 63}, "the batch is not stated"),
        ({"seconds": None, "mfu": 0.4}, "no speed in tokens or seconds"),
        ({"interleave": None}, "the pipeline's interleaving is not stated"),
    ],
)
def test_a_run_that_lacks_a_setting_is_left_out_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    table, run = complete()
    if reason.startswith("3 shards"):
        changes = {**changes, "strategy": "fsdp1"}
    assert made(table, {**run, **changes}) == reason


def test_a_complete_run_is_the_configuration_that_it_says() -> None:
    one = made(*complete())
    assert isinstance(one, Published)
    c = one.job
    assert (c.strategy, c.dp_shard, c.dp_replicate, c.tp, c.pp, c.interleave) == ("megatron", 4, 1, 2, 2, 2)
    assert (c.schedule, c.microbatch, c.microbatches, one.seconds) == ("interleaved", 1, 16, 10.0)


@pytest.mark.parametrize("policy", ["none", "selective", "full", "every-2", "first-20"])
def test_policies_that_a_configuration_has_are_its_own(policy: str) -> None:
    table, run = complete()
    one = made(table, {**run, "checkpointing": policy})
    assert isinstance(one, Published)
    assert one.job.checkpointing == policy


def test_runs_whose_settings_were_completed_keep_every_other_run_in_its_half() -> None:
    """They are last in their file: constants were fitted before, and no run of the other half may have been used."""
    halves = [(run.run.tokens_per_s_gpu, run.half) for run in runs() if run.table == "torchtitan"]
    before = halves[: [speed for speed, _ in halves].index(8532.0)]
    assert [half for speed, half in before if speed in (3890.0, 2540.0, 1071.0, 548.0)] == [
        "fit", "held out", "fit", "held out",
    ]  # fmt: skip
    assert len(before) == 19


def test_speeds_in_tokens_are_step_times() -> None:
    table, run = complete()
    tokens = 64 * 8192
    for speed in ({"tokens_per_s": tokens / 10.0}, {"tokens_per_s_gpu": tokens / 160.0}):
        one = made(table, {**run, "seconds": None, **speed})
        assert isinstance(one, Published)
        assert one.seconds == pytest.approx(10.0)


def test_racks_that_do_not_divide_a_run_are_used_in_part() -> None:
    """Of 72 GPUs 64, as published."""
    table, run = complete()
    racks = {**table, "clusters": {"gb200": "gb200-nvl72"}}
    one = made(racks, {**run, "hardware": "gb200", "gpus": 128, "global_batch": 512})
    assert isinstance(one, Published)
    assert (one.cluster.ranks_per_node, one.cluster.nodes) == (64, 2)


def curves() -> list[dict[int, tuple[float, float]]]:
    """Of each weakly scaled setting of NVIDIA's recipes: (published, predicted) seconds by number of GPUs."""
    found: dict[tuple[object, ...], dict[int, tuple[float, float]]] = defaultdict(dict)
    for run, predicted_s in zip(runs(), seconds()):
        if run.table == "dgxc-benchmarking":
            key = (run.setting, run.run.where, run.job.global_batch / run.run.gpus)
            found[key][run.run.gpus] = (run.seconds, predicted_s)
    return [curve for curve in found.values() if {128, 512, 2048} <= curve.keys()]


@pytest.mark.processes
def test_the_speed_that_a_gpu_loses_with_scale_is_predicted_within_5_points() -> None:
    """Of weak scaling from 128 GPUs to 2,048. Some published curves go up and down by 8 points on the way there."""
    assert len(curves()) >= 16
    between = []
    for curve in curves():
        losses = {gpus: [1 - curve[128][which] / curve[gpus][which] for which in (0, 1)] for gpus in (512, 2048)}
        assert losses[2048][1] == pytest.approx(losses[2048][0], abs=0.05), curve
        assert 0 < losses[512][1] < losses[2048][1]
        between.append(abs(losses[512][1] - losses[512][0]))
    assert median(between) < 0.02


def test_a_table_of_ones_own_is_read_alike() -> None:
    table, run = complete()
    given = msgspec.convert({**table, "runs": [run, {**run, "seq_len": None}]}, Source)
    found, left = load_runs({"mine": given})
    assert [one.run for one in found] == [msgspec.convert(run, Run)]
    assert left == {("mine", "the sequence length is not stated"): 1}
    assert [one.half for one in found] == ["held out"], "no constant was fitted on it"


@pytest.mark.slow
def test_published_allocated_memory_is_met() -> None:
    """SimuMax's runs on 8 B200."""
    found = [one for one in predicted(runs()) if one.memory_error is not None]
    assert {one.published.table for one in found} == {"simumax-b200"}
    assert len(found) == 43
    assert max(abs(one.memory_error or 0) for one in found) < 0.08


def test_a_fit_begins_at_the_sources_values_and_moves_those_that_results_speak_of() -> None:
    """One constant whose results are twice too high, and one that nothing depends on."""
    constants = [fit.Constant("a", 1e9, fit.UNKNOWN), fit.Constant("b", 0.5, fit.MEASURED)]
    found = fit.solve(constants, lambda logs: fit.bounded(logs[:1] - log(2)))
    values = fit.valued(constants, found)
    assert values["a"] == pytest.approx(2e9, rel=0.01)
    assert values["b"] == pytest.approx(0.5)


def test_fitted_constants_go_to_their_paths_with_a_source() -> None:
    cluster = load_cluster("lab-2x2gbit")
    values = {
        "straggling": 0.01, "hardware.matmul.fp32.efficiency": 0.5, "hardware.closed_forms.memory_bytes_per_s": 1e9,
        "hardware.attention_kernels.cudnn": 1.5,
    }  # fmt: skip
    made = fit.with_constants(cluster, values)
    assert made.accelerator.closed_forms is not None
    assert (made.straggling, made.accelerator.matmul["fp32"].efficiency) == (0.01, 0.5)
    assert (made.accelerator.closed_forms.memory_bytes_per_s, made.accelerator.closed_forms.bf16_efficiency) == (1e9, 0)
    assert (made.accelerator.attention_kernels["cudnn"], made.accelerator.sources["closed_forms"]) == (1.5, "fitted")
