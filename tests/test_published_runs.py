"""Published training runs: the files that ship, the rule that splits them, what is refused and in which words."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from refshard import resources
from refshard.errors import SpecError
from refshard.specs.cluster import load_cluster
from refshard.specs.published_run import PublishedRun, assign_halves, load_published_runs, read_source
from refshard.specs.reading import convert

RUNS = load_published_runs()
WRITTEN = datetime.date(2026, 11, 23)


def plain(**changes: Any) -> dict[str, Any]:
    """A run with every field that must be given."""
    fields = {
        "source": "a page", "link": "https://example.org/a", "run_date": datetime.date(2025, 1, 2),
        "settings_written": WRITTEN, "half": "held out", "repository": "someone/code", "commit": "0123abc",
        "entry": "train.py", "hardware": "h100-sxm-80gb", "cluster": "dgx-h100", "gpus": 8, "model": "llama3-8b",
        "seq_len": 4096, "local_batch": 2, "strategy": "fsdp2", "shard": 8, "reshard_after_forward": "all",
        "checkpointing": "full", "optimizer_implementation": "fused", "logits_fp32": "in the loss",
        "logits_kept": False, "attention": "flash", "norm": "rms_norm", "expandable_segments": True,
        "reserved_gib": 50.0,
    }  # fmt: skip
    return fields | changes


def run(**changes: Any) -> PublishedRun:
    return convert(plain(**changes), PublishedRun, where="run")


def test_the_runs_of_the_prototype_are_there_with_their_figures() -> None:
    figures = {name: (one.reserved_gib, one.tokens_per_s_gpu) for name, one in RUNS.items() if one.seen_before}
    assert figures == {
        "llama3-8b-h100x8-2024-12": (82.4, 5762),
        "llama3-8b-h100x128-2024-12": (67.0, 5605),
        "llama3-8b-h100x8-2024-11": (49.58594, None),
        "llama3-8b-h100x8-2025-06": (49.66, 5855),
    }


def test_there_are_enough_of_them_and_of_many_kinds() -> None:
    blind = [one for one in RUNS.values() if not one.seen_before]
    assert len([one for one in blind if one.reserved_gib or one.reserved_first_step_gib]) >= 20
    assert {one.hardware for one in blind} == {"h100-96gb-500w", "a100-sxm-80gb"}
    assert {one.strategy for one in blind} == {"fsdp1", "fsdp2", "single"}
    assert {one.checkpointing for one in blind} == {"none", "op", "every 2", "full"}
    assert {one.expandable_segments for one in blind} == {True, False}
    assert {one.tensor for one in blind} == {1, 2, 4, 8}
    for hardware in ("h100-96gb-500w", "a100-sxm-80gb"):
        timed = [one.half for one in RUNS.values() if one.hardware == hardware and one.tokens_per_s_gpu]
        assert min(timed.count("fit"), timed.count("held out")) >= 2


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_figures_and_profiles_agree(name: str) -> None:
    one = RUNS[name]
    assert load_cluster(one.cluster).hardware == one.hardware
    assert one.model in resources.model_profiles() or "imensions" in one.notes or "torchtitan's" in one.model
    if one.reserved_gib and one.active_gib:
        assert one.active_gib < one.reserved_gib
    if one.reserved_gib and one.reserved_first_step_gib:
        assert one.reserved_first_step_gib < one.reserved_gib
    # Optimizer states, gradients and weights alone are 16 bytes a parameter, less what a first step has not.
    if one.model in ("llama3-8b", "qwen3-32b") and (reserved := one.reserved_gib or one.reserved_first_step_gib):
        billions = {"llama3-8b": 8.03, "qwen3-32b": 32.76}[one.model]
        assert reserved > billions * 16e9 / one.gpus / 2**30
    assert one.step_s is None or 0.5 < one.step_s < 30


def test_halves_follow_the_rule() -> None:
    assert {name: one.half for name, one in RUNS.items()} == assign_halves(RUNS)


def test_sources_alternate_within_an_accelerator_and_later_ones_move_nobody() -> None:
    links = ["https://b", "https://a", "https://c"]
    runs = {link[-1] + str(n): run(link=link, tokens_per_s_gpu=5.0) for link in links for n in (1, 2)}
    runs["memory only"] = run(link="https://aa")
    runs["seen"] = run(link="https://ab", tokens_per_s_gpu=5.0, seen_before=True, half="fit")
    first = assign_halves(runs)
    assert first == {
        "a1": "held out", "a2": "held out", "b1": "fit", "b2": "fit", "c1": "held out", "c2": "held out",
        "memory only": "held out", "seen": "fit",
    }  # fmt: skip
    runs["later"] = run(link="https://0", tokens_per_s_gpu=5.0, settings_written=datetime.date(2027, 1, 1))
    runs["elsewhere"] = run(link="https://0", tokens_per_s_gpu=5.0, hardware="a100-sxm-80gb")
    assert assign_halves(runs) == first | {"later": "held out", "elsewhere": "held out"}


def test_a_steps_seconds_count_the_ranks_that_share_its_tokens() -> None:
    assert run(tokens_per_s_gpu=4096.0).step_s == 2.0
    assert run(tokens_per_s_gpu=4096.0, shard=4, tensor=2).step_s == 1.0
    assert run(tokens_per_s_gpu=4096.0, shard=1, tensor=2, pipeline=2, context=2).step_s == 0.25
    assert run().step_s is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shard": 4}, "gpus must be the product of shard, replicate, tensor, pipeline, context, got 8 and"),
        ({"expert": 3}, "expert must divide shard = 8, got 3"),
        ({"assumed": ["comit"]}, "assumed has the unknown field 'comit'; did you mean 'commit'?"),
        ({"link": "example.org"}, "link must begin with https://, got 'example.org'"),
        ({"commit": " "}, "commit must say something, got nothing"),
        ({"reserved_gib": None}, "reserved_gib or another figure must be given"),
        ({"reserved_gib": -1.0}, "reserved_gib must be > 0 and finite, got -1.0"),
        ({"capacity_gib": 40.0}, "capacity_gib must be > 50 and finite, got 40.0"),
        ({"seen_before": True}, "half must be 'fit' for a run that was seen before, got 'held out'"),
        ({"run_date": datetime.date(2027, 1, 1)}, "run_date must not be after settings_written, got 2027-01-01"),
        ({"reshard_after_forward": ""}, "reshard_after_forward must be given for fsdp2, got nothing; add it"),
        ({"local_batch": 0}, "local_batch must be >= 1, got 0"),
        ({"atention": "flash"}, "unknown key 'atention'; did you mean 'attention'?"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as refused:
        run(**changes)
    assert str(refused.value).startswith(f"run: {told}")


def test_what_runs_share_comes_first_and_their_own_goes_before_it(tmp_path: Path) -> None:
    shared = {key: value for key, value in plain().items() if key not in ("gpus", "shard")}
    path = tmp_path / "source.toml"
    path.write_text(
        "[shared]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in shared.items())
        + 'assumed = ["entry"]\nnotes = "Shared."\n'
        + '[[runs]]\nname = "small"\ngpus = 8\nshard = 8\n'
        + '[[runs]]\nname = "large"\ngpus = 64\nshard = 64\nreserved_gib = 30.5\nassumed = ["model"]\nnotes = "Own."\n'
    )  # fmt: skip
    runs = read_source(path)
    assert (runs["small"].reserved_gib, runs["small"].assumed, runs["small"].notes) == (50.0, ("entry",), "Shared.")
    assert (runs["large"].reserved_gib, runs["large"].gpus) == (30.5, 64)
    assert (runs["large"].assumed, runs["large"].notes) == (("entry", "model"), "Shared. Own.")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[share]\n", "unknown key 'share'; did you mean 'shared'?"),
        ("[[runs]]\ngpus = 8\n", "name must be given once for each of runs, got ''"),
        ('[[runs]]\nname = "a"\n', "published run a: source is missing; add it"),
        ('[[runs]]\nname = ""\n', "name must be given once for each of runs, got ''"),
    ],
)
def test_a_file_that_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "source.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=told.replace("?", r"\?")):
        read_source(path)


def test_two_files_cannot_give_one_name(tmp_path: Path) -> None:
    text = "\n".join(f"{key} = {_toml(value)}" for key, value in plain().items())
    for stem in ("a", "b"):
        (tmp_path / f"{stem}.toml").write_text(f'[[runs]]\nname = "same"\n{text}\n')
    with pytest.raises(SpecError, match=r"b\.toml: the name 'same' is taken by another file's run"):
        load_published_runs([tmp_path / "a.toml", tmp_path / "b.toml"])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
