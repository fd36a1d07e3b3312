"""Runs with a script: the files, the rule that splits them, and what is refused."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from refshard import resources
from refshard.errors import SpecError
from refshard.specs.cluster import load_cluster
from refshard.specs.reading import convert
from validation.schema import Run, Source, read_source, scripted_runs

RUNS = scripted_runs()
WRITTEN = datetime.date(2026, 11, 23)
LATER = datetime.date(2026, 11, 28)


SCRIPT: dict[str, Any] = {
    "repository": "someone/code", "commit": "0123abc", "entry": "train.py", "reshard_after_forward": "all",
    "optimizer_implementation": "fused", "logits_fp32": "in the loss", "logits_kept": False, "attention": "flash",
    "norm": "rms_norm", "expandable_segments": True,
}  # fmt: skip


def plain(**changes: Any) -> dict[str, Any]:
    """A run with every field that must be given; ``script__`` before the name of a field of its script."""
    script = {key.removeprefix("script__"): value for key, value in changes.items() if key.startswith("script__")}
    fields = {
        "name": "one", "date": datetime.date(2025, 1, 2), "hardware": "h100-sxm-80gb", "gpus": 8,
        "model": "llama3-8b", "seq_len": 4096, "microbatch": 2, "strategy": "fsdp2", "dp_shard": 8, "precision": "bf16",
        "checkpointing": "full", "reserved_gib": 50.0, "script": SCRIPT | script,
    }  # fmt: skip
    return fields | {key: value for key, value in changes.items() if not key.startswith("script__")}


def source(*runs: dict[str, Any], **changes: Any) -> Source:
    fields = {
        "title": "runs", "source": "a page", "link": "https://example.org/a", "written": WRITTEN,
        "clusters": {"h100-sxm-80gb": "dgx-h100", "a100-sxm-80gb": "dgx-a100"}, "runs": runs,
    }  # fmt: skip
    return convert(fields | changes, Source, where="source")


def test_the_runs_of_the_prototype_are_there_with_their_figures() -> None:
    figures = {
        name: (one.run.reserved_gib, one.run.tokens_per_s_gpu) for name, one in RUNS.items() if one.run.seen_before
    }
    assert figures == {
        "llama3-8b-compiled-h100x8-2024-12": (77.0, 6667),
        "llama3-8b-compiled-h100x128-2024-12": (62.0, 6514),
        "llama3-8b-compiled-h100x8-2025-02": (47.65, 5760),
        "llama3-8b-compiled-h100x8-2025-03": (47.65, None),
        "llama3-8b-h100x8-2024-12": (82.4, 5762),
        "llama3-8b-h100x128-2024-12": (67.0, 5605),
        "llama3-8b-h100x8-2024-11": (49.58594, None),
        "llama3-8b-h100x8-2025-06": (49.66, 5855),
    }


def test_there_are_enough_of_them_and_of_many_kinds() -> None:
    blind = [one.run for one in RUNS.values() if not one.run.seen_before]
    assert len([one for one in blind if one.reserved_gib or one.reserved_first_step_gib]) >= 20
    assert {one.hardware for one in blind} == {"h100-96gb-500w", "h100-sxm-80gb", "a100-sxm-80gb", "l40s"}
    assert {one.strategy for one in blind} == {"fsdp1", "fsdp2", "simplefsdp", "single"}
    assert len([one for one in blind if one.compiled]) >= 24
    assert len([one for one in blind if one.ep > 1]) >= 5
    assert len([one for one in blind if one.gpus == 1]) >= 20
    assert {one.precision for one in blind} == {"bf16", "fp8", "fp8-rowwise"}
    adapters = [one.script.adapter for one in blind if one.script and one.script.adapter]
    assert {one.method for one in adapters} == {"lora", "dora", "norms"}
    assert {one.checkpointing for one in blind} == {"none", "selective", "every-2", "full"}
    assert {one.script.expandable_segments for one in RUNS.values()} == {True, False}
    assert {one.tp for one in blind} == {1, 2, 4, 8}
    for hardware in ("h100-96gb-500w", "a100-sxm-80gb"):
        timed = [one.half for one in RUNS.values() if one.run.hardware == hardware and one.run.tokens_per_s_gpu]
        assert min(timed.count("fit"), timed.count("held out")) >= 2


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_figures_and_profiles_agree(name: str) -> None:
    one, run = RUNS[name], RUNS[name].run
    assert load_cluster(one.cluster).hardware == run.hardware
    notes = one.source.settings + run.notes
    assert run.model in resources.model_profiles() or "imensions" in notes or "torchtitan's" in run.model
    if run.reserved_gib and run.active_gib:
        assert run.active_gib < run.reserved_gib
    if run.reserved_gib and run.reserved_first_step_gib:
        assert run.reserved_first_step_gib < run.reserved_gib
    # Optimizer states, gradients and weights alone are 16 bytes a parameter, less what a first step has not.
    if run.model in ("llama3-8b", "qwen3-32b") and (reserved := run.reserved_gib or run.reserved_first_step_gib):
        billions = {"llama3-8b": 8.03, "qwen3-32b": 32.76}[run.model]
        assert reserved > billions * 16e9 / run.gpus / 2**30
    if run.tokens_per_s_gpu is not None:
        assert 0.5 < (run.microbatch or 0) * (run.seq_len or 0) / run.tokens_per_s_gpu / run.model_parallel < 30


def test_halves_are_those_that_were_assigned_before_any_dry_run() -> None:
    fitted = [name for name, one in RUNS.items() if one.half == "fit" and one.source.written == WRITTEN]
    assert fitted == [
        "llama3-8b-h100x8-2024-12", "llama3-8b-h100x128-2024-12", "llama3-8b-h100x8-2025-06",
        "llama2-7b-fsdp1-full-h100x8-2024-03", "llama2-7b-fsdp2-full-h100x8-2024-03",
        "llama2-7b-fsdp2-tp2-full-h100x8-2024-03", "llama3-8b-h100x8-2025-10", "llama3-8b-h100x64-2025-10",
        "llama3-8b-tp2-h100x8-2025-10", "llama3-8b-foreach-a100x8-2024-06", "llama3-8b-fused-a100x8-2024-06",
        "llama3-8b-h100x8-2024-11", "llama3-8b-h100x8-2025-03", "llama3-8b-chunked-loss-h100x8-2025-03",
    ]  # fmt: skip
    later = {one.source.title for one in RUNS.values() if one.half == "fit" and one.source.written == LATER}
    assert sorted(later) == [
        "Llama 3 8B on 8 H100, compiled: a log of 100 steps",
        "Llama 3 8B on 8 H100, compiled: bf16, float8 by row, and float8 by tensor gathered in float8",
        "Llama 3.1 8B, FSDP2, with torch.compile, in bf16 and in float8",
        "Llama 3.2 3B on one A100: the rows that add to a packed dataset, from torch.compile to QLoRA",
        "Qwen3 32B on 8 H100, compiled: one line of a log",
        "compiled float8 on 8 H100: selective checkpointing that keeps absolute values or not",
    ]


def test_a_run_states_all_unless_a_setting_of_its_memory_is_assumed_or_lies_in_the_data() -> None:
    stated = [name for name, one in RUNS.items() if one.run.states_all]
    assert len(stated) == 14
    assert {RUNS[name].source.source.split(",")[0] for name in stated} == {
        "foundation-model-stack/fms-acceleration", "pytorch/torchtitan",
    }  # fmt: skip
    assert not RUNS["llama3-8b-h100x8-2024-12"].run.states_all
    assert not RUNS["deepseek-v3-16b-flex-ep8-h100x8-2025-08"].run.states_all


def halves(*sources: Source) -> dict[str, str]:
    found = scripted_runs({str(place): one for place, one in enumerate(sources)})
    return {name: one.half for name, one in found.items()}


def test_sources_alternate_within_an_accelerator_and_later_ones_move_nobody() -> None:
    def two(page: str) -> Source:
        runs = (plain(name=f"{page}{n}", tokens_per_s_gpu=5.0) for n in (1, 2))
        return source(*runs, link=f"https://{page}")

    seen = plain(name="seen", tokens_per_s_gpu=5.0, seen_before=True)
    sources = [
        two("b"), two("a"), two("c"), source(plain(name="memory only"), link="https://aa"),
        source(seen, link="https://ab"),
    ]  # fmt: skip
    first = halves(*sources)
    assert first == {
        "a1": "held out", "a2": "held out", "b1": "fit", "b2": "fit", "c1": "held out", "c2": "held out",
        "memory only": "held out", "seen": "fit",
    }  # fmt: skip
    timed = plain(name="later", tokens_per_s_gpu=5.0)
    later = source(timed, link="https://0", written=datetime.date(2027, 1, 1))
    elsewhere = source({**timed, "name": "elsewhere", "hardware": "a100-sxm-80gb"}, link="https://0")
    assert halves(*sources, later, elsewhere) == first | {"later": "held out", "elsewhere": "held out"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dp_shard": 4}, "gpus must be the product of dp_shard, dp_replicate, tp, pp, cp, got 8 and"),
        ({"ep": 3}, "ep must divide dp_shard = 8, got 3"),
        ({"assumed": ["comit"]}, "assumed has the unknown field 'comit'; did you mean 'commit'?"),
        ({"script__commit": " "}, "script.commit must say something, got nothing"),
        ({"reserved_gib": None}, "a run must have a figure, one of seconds, tokens_per_s, "),
        ({"reserved_gib": -1.0}, "reserved_gib must be > 0 and finite, got -1.0"),
        ({"capacity_gib": 40.0}, "capacity_gib must be > 50 and finite, got 40.0"),
        ({"script__reshard_after_forward": ""}, "reshard_after_forward must be given for fsdp2, got nothing; add it"),
        ({"microbatch": 0}, "microbatch must be >= 1, got 0"),
        ({"seq_len": None}, "seq_len must be given for a run with a script, got nothing; add it"),
        ({"name": ""}, "name must be given for a run with a script, got nothing; add it"),
        (
            {"script__adapter": {"method": "lora", "targets": ["q"]}},
            "script.adapter.rank must be given for LoRA and DoRA alone, got None for lora",
        ),
        (
            {"script__adapter": {"method": "norms", "targets": ["norm"], "alpha": 1}},
            "script.adapter.alpha must be given for LoRA and DoRA alone, got 1 for norms",
        ),
        ({"script__atention": "flash"}, "script has the unknown key 'atention'; did you mean 'attention'?"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as refused:
        convert(plain(**changes), Run, where="run")
    assert str(refused.value).startswith(f"run: {told}")


def test_a_source_without_a_page_or_a_day_and_a_run_without_a_cluster_are_refused() -> None:
    with pytest.raises(SpecError, match=r"link must begin with https://, got 'example.org'"):
        source(plain(), link="example.org")
    for written in (None, datetime.date(2024, 1, 1)):
        with pytest.raises(SpecError, match=f"written must not be before the date of a run, 2025-01-02, got {written}"):
            source(plain(), written=written)
    with pytest.raises(SpecError, match="run 'one': clusters must name a profile for h100-sxm-80gb, got none; add it"):
        scripted_runs({"mine": source(plain(), clusters={})})


def test_two_runs_cannot_have_one_name() -> None:
    with pytest.raises(SpecError, match="published b: the name 'one' is taken by another run; give it another"):
        scripted_runs({"a": source(plain()), "b": source(plain())})


def test_a_run_gives_what_differs_from_the_defaults_of_its_file(tmp_path: Path) -> None:
    script = "".join(f"{key} = {_toml(value)}\n" for key, value in SCRIPT.items())
    shared = {key: value for key, value in plain().items() if key not in ("name", "gpus", "dp_shard", "script")}
    path = tmp_path / "source.toml"
    path.write_text(
        'title = "t"\nsource = "s"\nlink = "https://example.org"\nwritten = 2026-11-23\n[defaults]\n'
        + "".join(f"{key} = {_toml(value)}\n" for key, value in shared.items())
        + f'assumed = ["entry"]\n[defaults.script]\n{script}'
        + '[[runs]]\nname = "small"\ngpus = 8\ndp_shard = 8\n'
        + '[[runs]]\nname = "large"\ngpus = 64\ndp_shard = 64\nreserved_gib = 30.5\nassumed = ["model"]\n'
        + 'script.norm = "triton"\n'
    )  # fmt: skip
    small, large = read_source(path).runs
    assert small.script is not None
    assert large.script is not None
    assert (small.reserved_gib, small.assumed, small.script.norm) == (50.0, ("entry",), "rms_norm")
    assert (large.reserved_gib, large.assumed, large.script.norm) == (30.5, ("entry", "model"), "triton")
    assert (large.script.commit, large.gpus) == ("0123abc", 64)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
