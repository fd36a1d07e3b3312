"""Published runs as dry runs: how a run becomes a command, what is compared, and the record that the docs show."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as altered

from refshard import resources
from refshard.dryrun.request import Answer, Outcome, Pool, Request
from refshard.dryrun.run import DryRun
from refshard.specs.cluster import load_cluster
from tests.dryrun.made import Made
from tests.fakecuda.needs import needs_device
from tests.report.printed import as_csv, rows, tables, verdict
from validation.dry_runs import SCRIPTS, caveats, predict, recorded_cases, request_of, speed_of, why_not
from validation.report import dry_run_answer, summary
from validation.schema import Scripted, scripted_runs

pytestmark = pytest.mark.processes

RUNS = scripted_runs()
GIB = 2**30
PLAIN = RUNS["llama3-8b-h100x8-2025-06"]


def options(one: Scripted) -> dict[str, str]:
    """The options of the run's command; a switch is empty, and what is given several times is joined."""
    script, *given = request_of(one).command
    assert script.endswith(f"validation/script/{one.script.program}.py")
    found: dict[str, str] = {}
    for name, _, value in (option.removeprefix("--").partition("=") for option in given):
        found[name] = f"{found[name]}+{value}" if name in found else value
    return found


def changed(one: Scripted, **changes: Any) -> Scripted:
    """With other fields of the run or of its script."""
    of_script = {key: value for key, value in changes.items() if key in one.script.__struct_fields__}
    of_run = {key: value for key, value in changes.items() if key not in of_script}
    script = altered(one.script, **of_script)
    return replace(one, run=altered(one.run, script=script, **of_run))


def test_a_run_becomes_a_command_of_the_script() -> None:
    assert options(PLAIN) == {
        "layers": "32", "dim": "4096", "heads": "32", "kv-heads": "8", "hidden": "14336", "vocab": "128256",
        "head-dim": "128", "seq-len": "8192", "batch": "1", "positions": "8192", "strategy": "fsdp2",
        "units": "blocks", "reshard": "but-last", "dp-shard": "8", "dp-replicate": "1", "tp": "1", "checkpoint": "op",
        "norm": "composite", "attention": "flash", "loss": "whole", "logits-fp32": "loss", "optimizer": "fused",
        "parameter-dtype": "float32", "compute-dtype": "bfloat16", "reduce-dtype": "float32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3-8b-chunked-loss-h100x8-2025-03", {"loss": "chunked"}),
        ("llama3-8b-tp2-h100x8-2025-10",
         {"units": "parts", "reshard": "all", "dp-shard": "4", "tp": "2", "norm": "fused", "attention": "cudnn",
          "loss-parallel": ""}),
        ("llama3-8b-foreach-a100x8-2024-06",
         {"positions": "16384", "norm": "operators", "logits-fp32": "model", "optimizer": "foreach",
          "keep-logits": ""}),
        ("llama2-7b-fsdp1-full-h100x8-2024-03",
         {"strategy": "fsdp1", "checkpoint": "full", "positions": "65536", "fold": "", "log-every": "1"}),
        ("debugmodel-fsdp1-h100x4-2024-03", {"layers": "2", "checkpoint": "2", "head-dim": "16"}),
        ("qwen3-32b-batch1-h100x8-2025-09", {"head-dim": "128", "query-norm": "", "rotary": "halves"}),
        ("llama3-8b-compiled-h100x8-2024-12", {"compile": "blocks", "also-saved": "aten.abs.default"}),
        ("qwen3-32b-compiled-batch2-h100x8-2025-09", {"compile": "blocks+loss", "checkpoint": "full"}),
        ("llama3-8b-compiled-fp8-gathered-recomputed-h100x8-2025-02",
         {"float8": "tensor", "float8-gathered": "", "float8-recomputed": ""}),
        ("llama3-8b-compiled-fp8-rowwise-h100x8-2025-02", {"float8": "row"}),
        ("llama3-8b-simplefsdp-tp2-h100x8-2025-10",
         {"strategy": "simplefsdp", "compile": "model+loss", "compile-backend": "aot_eager", "tp": "2"}),
        ("deepseek-v3-16b-ep4-saved-a100x8-2025-09",
         {"experts": "64", "ep": "4", "experts-by": "loop", "code": "2025-09-06", "checkpoint": "op", "compile": "loss",
          "also-saved": "flex_attention+_c10d_functional.all_to_all_single.default+copies to the host"}),
        ("deepseek-v3-16b-batch4-ep8-h100x8-2025-10", {"checkpoint": "parts", "experts-by": "grouped"}),
        ("mistral-7b-qlora-batch4-a100x1-2025-02",
         {"hidden": "14336", "rank": "16", "target": "q_proj+k_proj+v_proj+o_proj", "nf4": "", "autocast": "",
          "reentrant": "", "loss": "copied", "dropout": "0.1"}),
        ("mixtral-8x7b-qlora-batch8-a100x1-2025-02", {"experts": "8", "active": "2", "hidden": "14336", "nf4": ""}),
        ("llama3.2-3b-norms-l40s-2026-07", {"tied": "", "masked": "", "adapter": "norms", "attention": "efficient"}),
        ("llama3.2-3b-8bit-a100x1-2024-11",
         {"optimizer": "8bit", "in-backward": "", "offload": "", "compile": "attention+blocks+loss"}),
    ],
)  # fmt: skip
def test_settings_become_options(name: str, expected: dict[str, str]) -> None:
    found = options(RUNS[name])
    assert {option: found.get(option) for option in expected} == expected


def test_the_request_names_the_machine_and_the_allocators_mode() -> None:
    request = request_of(RUNS["llama3-8b-h100x128-2024-12"])
    assert (request.cluster, request.world_size, request.local_ranks) == ("torchtitan-h100", 128, 8)
    assert request.environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert request_of(PLAIN).environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert request_of(PLAIN, expandable=False).environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"precision": "nvfp4"}, "the script computes in bf16, not in nvfp4"),
        ({"cp": 2, "dp_shard": 4}, "pipeline and context parallelism"),
        ({"strategy": "single"}, "the script does not wrap a model this way"),
    ],
)
def test_what_the_script_does_not_stand_for_is_refused_and_nothing_runs(changes: dict[str, Any], told: str) -> None:
    def launch(_: Request) -> DryRun:
        raise AssertionError("ran")

    assert why_not(PLAIN) == ""
    found = predict(changed(PLAIN, **changes), launch=launch)
    assert found.refused.startswith(told)
    assert found.compared == ()


def dry(request: Request, outcome: Outcome = "stepped") -> DryRun:
    """Two steps, of 3 and 5 GiB reserved with expandable segments and 4 and 6 without, and 2 GiB active."""
    made = Made()
    more = "True" not in request.environment["PYTORCH_ALLOC_CONF"]
    for gib in (3 + more, 2):
        made.segment(gib * GIB)
        made.launch("aten::relu", signature="bf16[8] -> bf16[8]", reads=2 * 10**9)
        made.mark("step")
    pool = Pool(allocated=0, active=2 * GIB, reserved=5 * GIB, requested=0)
    answer = Answer(outcome=outcome, error="a word", steps_taken=2, peak=pool, now=pool, world_size=8)
    return DryRun(request=request, answer=answer, recording=made.recording())


def test_what_is_published_is_compared_and_the_other_mode_where_the_source_is_silent() -> None:
    published = changed(PLAIN, reserved_gib=4.0, reserved_first_step_gib=3.0, active_gib=2.5, tokens_per_s_gpu=None)
    sure = predict(published, launch=dry).compared
    assert [(c.figure, c.published, c.predicted, c.other_mode) for c in sure] == [
        ("reserved, step 1", 3.0, 3.0, None), ("reserved", 4.0, 5.0, None), ("active", 2.5, 2.0, None)
    ]  # fmt: skip
    doubted = predict(changed(published, assumed=("expandable_segments",)), launch=dry).compared
    assert [c.other_mode for c in doubted] == [4.0, 6.0, 2.0]
    assert [c.predicted for c in doubted] == [c.predicted for c in sure]


def test_reserved_memory_does_not_count_where_the_allocator_mode_is_not_stated() -> None:
    figures = {"reserved_gib": 5.0, "reserved_first_step_gib": None, "active_gib": 2.5, "tokens_per_s_gpu": None}
    published = changed(PLAIN, name="mine", **figures)
    one = predict(changed(published, assumed=("expandable_segments",)), launch=dry)
    found = dry_run_answer([one])
    reserved, active = rows(tables(found)[0])
    assert (reserved["dry run"], reserved["error"]) == ("5.00 or 6.00 GiB", "+0.00% or +20.00%")
    assert (active["dry run"], active["error"]) == ("2.00 GiB", "-20.00%")
    assert reserved["allocator mode"] == active["allocator mode"] == "not stated"
    assert verdict(found)[1:] == [
        "memory, fit: 1 figures, median error 20.00%, worst 20.00%",
        "memory, some assumed: 1 figures, median error 20.00%, worst 20.00%",
        "reserved memory, allocator mode not stated: 1 figures, not counted; 1 are within 0.2% of one of the two "
        "modes, and the worst is 0.00% off both",
    ]


def test_ranks_that_share_a_sequence_count_it_once() -> None:
    cluster = load_cluster(PLAIN.cluster)
    alone = speed_of(PLAIN, dry(request_of(PLAIN)), cluster)
    shared = changed(PLAIN, dp_shard=4, tp=2)
    assert speed_of(shared, dry(request_of(shared)), cluster) == pytest.approx(alone / 2)
    # 2 GB and little else.
    assert alone == pytest.approx(8192 / (2e9 / cluster.accelerator.memory_bytes_per_s), rel=0.01)


def test_a_run_that_takes_no_steps_is_told() -> None:
    found = predict(PLAIN, launch=lambda request: dry(request, "failed"))
    assert found.refused == "the dry run did not take its steps (failed): a word"


def test_errors_are_absolute() -> None:
    assert summary([-0.1, 0.05, 0.3]) == "3 figures, median error 10.00%, worst 30.00%"


def test_the_table_keeps_the_halves_apart() -> None:
    one = predict(changed(PLAIN, name="mine", tokens_per_s_gpu=None, reserved_gib=5.0), launch=dry)
    other = replace(one, published=replace(changed(one.published, name="theirs"), half="held out"))
    found = dry_run_answer([one, other])
    assert [row["run"] for row in rows(tables(found)[0])] == ["mine (fit)"] * 2 + ["theirs (held out)"] * 2
    assert [sentence.partition(", median")[0] for sentence in verdict(found)] == [
        "0 of 2 published runs state all settings that decide memory", "memory, fit: 2 figures",
        "memory, held out: 2 figures", "memory, some assumed: 4 figures",
    ]  # fmt: skip
    assert [(row["name"], row["half"]) for row in as_csv(found)] == [("mine", "fit")] * 2 + [("theirs", "held out")] * 2
    assert caveats(PLAIN) == ()


RECORDED = {run["name"]: run for run in json.loads((SCRIPTS.parent / "dry_runs.json").read_text())}
"""What the docs show."""
TRIED = (
    "debugmodel-fsdp1-h100x4-2024-03", "llama3-8b-h100x8-2024-12", "llama3-8b-h100x128-2024-12",
    "llama3-8b-h100x8-2024-11", "llama3-8b-reshard-default-h100x8-2025-02", "mistral-7b-full-batch4-a100x1-2025-02",
    "mistral-7b-lora-batch8-a100x1-2025-02",
)  # fmt: skip
"""Runs that tests dry-run. The first takes seconds."""


@pytest.fixture(scope="module")
def _scripts() -> Iterator[None]:
    """The scripts can be imported, by names that are not theirs alone."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))
    for path in SCRIPTS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.usefixtures("_scripts")
@pytest.mark.parametrize("name", RUNS)
def test_every_run_becomes_options_that_its_script_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = RUNS[name]
    assert why_not(one) == ""
    monkeypatch.setattr(sys, "argv", list(request_of(one).command))
    found = importlib.import_module(one.script.program).read_options()
    assert (found.seq_len, found.batch) == (one.run.seq_len, one.run.microbatch)


def test_what_a_dry_run_does_not_know_of_a_runs_memory_is_told() -> None:
    for name in ("deepseek-v3-16b-flex-ep8-h100x8-2025-08", "mixtral-8x7b-qlora-batch8-a100x1-2025-02"):
        (routed,) = caveats(RUNS[name])
        assert routed.startswith("memory depends on how its router spread the tokens")
    (longest,) = caveats(RUNS["llama3.2-3b-lora32-l40s-2026-07"])
    assert longest.endswith("the dry run has the most that it may be, 768")


def test_the_record_has_every_run_with_its_published_figures() -> None:
    assert RECORDED.keys() == RUNS.keys()
    for name, one in RUNS.items():
        run = one.run
        published = (
            run.reserved_first_step_gib, run.reserved_gib, run.active_gib, run.allocated_gib, run.tokens_per_s_gpu
        )  # fmt: skip
        told = [figure["published"] for figure in RECORDED[name]["compared"]]
        assert told == pytest.approx([value for value in published if value is not None], abs=0.51), name
        assert RECORDED[name]["half"] == one.half


@needs_device
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("debugmodel") else pytest.mark.full) for name in TRIED]
)
def test_dry_runs_are_as_recorded(name: str) -> None:
    found = {one.figure: one for one in predict(RUNS[name]).compared}
    for figure in RECORDED[name]["compared"]:
        now = found[figure["figure"]]
        assert now.predicted == pytest.approx(figure["predicted"], rel=5e-4 if now.is_memory else 5e-3, abs=0.006)
        if not now.counts:
            assert now.other_mode == pytest.approx(figure["other_mode"], rel=5e-4, abs=0.006)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two launches of one case, of which one failed, and a case without a prediction."""
    folder = tmp_path / "profiles" / "recorded" / "gpu"
    folder.mkdir(parents=True)
    gib = 2**30
    rows = [
        {"name": "a", "peak": {"reserved": 4 * gib}, "step_s": 0.1},
        {"name": "a", "peak": {"reserved": 4 * gib}, "step_s": 0.3},
        {"name": "a", "error": "exit 1"},
        {"name": "b", "peak": {"reserved": gib}, "step_s": 0.1},
    ]
    predicted = [
        {"name": "a", "half": "held out", "peak": {"reserved": 5 * gib}, "step_s": 0.1},
        {"name": "b", "half": "fit", "peak": {"reserved": 0}, "step_s": None},
    ]
    for name, lines in (("cases-1", rows), ("predicted", predicted)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    return folder


@pytest.mark.usefixtures("machine")
def test_a_case_is_the_median_of_its_launches_beside_its_prediction() -> None:
    found = recorded_cases()
    assert [(one.machine, one.name, one.half, one.figure) for one in found] == [
        ("gpu", "a", "held out", "reserved"), ("gpu", "a", "held out", "step time"),
    ]  # fmt: skip
    assert [(one.measured, one.predicted) for one in found] == [(4.0, 5.0), (pytest.approx(0.2), 0.1)]
    assert [one.error for one in found] == pytest.approx([0.25, -0.5])


@pytest.mark.usefixtures("machine")
def test_they_are_a_kind_of_their_own() -> None:
    data = dry_run_answer([], recorded_cases()).data
    assert data["verdict"] == [
        "measured on gpu, reserved memory: 1 figures, median error 25.00%, worst 25.00%",
        "measured on gpu, step time, held out: 1 figures, median error 50.00%, worst 50.00%",
    ]
    assert [(row["name"], row["figure"]) for row in data["recorded"]] == [("a", "reserved"), ("a", "step time")]
