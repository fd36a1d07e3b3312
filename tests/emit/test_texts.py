"""The texts, command by command and note by note, as they were accepted (``golden/``), and the refusals.

``pytest tests/emit/test_texts.py --accept`` writes them anew.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.commands.plan import PLANNED
from refshard.emit.suite import COMPILED, MODEL, PLANNED_ONLY, SPLIT, SPLIT_BY_SEQUENCE, STAGED
from refshard.emit.table import TOOLS, emit
from refshard.emit.tool import Emitted, Setting, preset
from refshard.emit.torchtitan import FLAVORS
from refshard.errors import SpecError
from refshard.specs.model import load_model
from refshard.specs.suite import parse_suite
from refshard.strategies import check_case
from refshard.strategies.table import ROWS
from tests.emit.jobs import DEEPSPEED, EVERY, REFSHARD, job

GOLDEN = Path(__file__).parent / "golden"
CASES = [(tool, name) for tool, jobs in EVERY.items() for name in jobs]


def as_text(emitted: Emitted) -> str:
    """Everything that was emitted, in one text."""
    files = "".join(f"==> {name} <==\n{text}\n" for name, text in emitted.files.items())
    notes = "".join(f"- {note}\n" for note in emitted.notes)
    return f"{files}$ {emitted.command}\n\n{notes}"


@pytest.mark.parametrize(("tool", "name"), CASES)
def test_what_is_emitted_is_as_accepted(tool: str, name: str, request: pytest.FixtureRequest) -> None:
    path, text = GOLDEN / f"{tool}-{name}.txt", as_text(emit(tool, EVERY[tool][name]))
    if request.config.getoption("accept"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_accepted_text_has_a_job() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {f"{tool}-{name}" for tool, name in CASES}


@pytest.mark.parametrize(("tool", "name"), CASES)
def test_notes_are_sentences(tool: str, name: str) -> None:
    emitted = emit(tool, EVERY[tool][name])
    assert emitted.version
    for note in emitted.notes:
        assert note.endswith(".")
        assert len(note) < 200


@pytest.mark.parametrize(
    ("tool", "fields", "message"),
    [
        ("torchtitan", {"strategy": "fsdp1", "dp_shard": 8}, "strategy must be one that it runs .*'fsdp1'; name one"),
        (
            "torchtitan", {"model": "llama2-7b", "dp_shard": 8},
            "dimensions of one of its flavors .*, got 32 layers of width",
        ),
        (
            "torchtitan", {"dp_shard": 8, "checkpointing": "every-2"},
            "'every-2'; plan with --checkpointing none,full,sel",
        ),
        ("torchtitan", {"dp_shard": 8, "precision": "fp8"}, "for precision 'fp8', got false; plan with --compile yes"),
        ("torchtitan", {"dp_shard": 8, "pp": 5}, r"pp \* interleave must divide the 32 layers, got 5"),
        ("torchtitan", {"dp_shard": 1, "tp": 16}, "tp must divide the 8 key-value heads, got 16"),
        ("torchtitan", {"dp_shard": 8, "ep": 2}, "llama3-8b, which has no experts, got 2; plan with --ep 1"),
        (
            "torchtitan", {"dp_shard": 2, "pp": 4, "schedule": "zero-bubble"},
            "at least 2 for schedule 'zero-bubble', got 1; plan with --interleave 2 or --schedule 1f1b",
        ),
        ("torchtitan", {"strategy": "ddp", "dp_shard": 2, "cp": 4}, "cp and ep must be 1, got 4 and 1; their ranks"),
        ("torchtitan", {"strategy": "simplefsdp", "dp_shard": 8, "pp": 2}, "pp must be 1, got 2; plan with"),
        ("accelerate", {"dp_shard": 8, "pp": 2}, "pp must be 1, got 2; emit for torchtitan or megatron"),
        ("accelerate", {"strategy": "fsdp1", "dp_shard": 2, "tp": 4}, "tp must be 1, got 4; plan with --str"),
        (
            "accelerate", {"dp_shard": 1, "dp_replicate": 2, "cp": 4},
            "dp_shard must be at least 2 where dp_replicate = 2",
        ),
        (
            "accelerate", {"strategy": "fsdp1", "dp_shard": 4, "dp_replicate": 2},
            "dp_shard must be a node's 8 ranks .*, got 4",
        ),
        (
            "accelerate", {"dp_shard": 8, "checkpointing": "first-3"},
            "checkpointing must be one of 'none', 'full', got 'first-3'",
        ),
        ("megatron", {"strategy": "fsdp2", "dp_shard": 8}, "got 'fsdp2'; name one of these with --strategy, or emit"),
        ("megatron", {"strategy": "megatron", "dp_shard": 8, "checkpointing": "selective"}, "got 'selective': its own"),
        (
            "megatron", {"strategy": "megatron", "dp_shard": 2, "pp": 4, "interleave": 2, "schedule": "interleaved",
                         "microbatches": 6}, "microbatches must be a multiple of pp = 4 .*, got 6",
        ),
        (
            "megatron", {"strategy": "megatron", "dp_shard": 2, "pp": 4, "interleave": 2, "schedule": "interleaved",
                         "microbatches": 8, "checkpointing": "first-3"},
            "interleave = 2, got 'first-3'; plan with --checkpointing full",
        ),
        ("megatron", {"strategy": "megatron", "dp_shard": 2, "pp": 4, "schedule": "zero-bubble"}, "'zero-bubble'"),
        ("deepspeed", {"dp_shard": 8, "tp": 2}, "tp must be 1, got 2; emit for torchtitan or megatron"),
        ("deepspeed", {"strategy": "refshard-yafsdp", "dp_shard": 8}, "got 'refshard-yafsdp'"),
        (
            "deepspeed", {"strategy": "deepspeed-zero2", "dp_shard": 4, "dp_replicate": 2},
            "dp_replicate must be 1 for ZeRO-2",
        ),
        ("deepspeed", {"dp_shard": 8, "precision": "fp8"}, "'bf16' or 'fp32', got 'fp8'; plan with --precision bf16"),
        ("refshard", {"strategy": "refshard-fsdp", "dp_shard": 4, "cp": 2}, "cp must be 1, got 2; plan with"),
        ("refshard", {"strategy": "fsdp1", "dp_shard": 4, "pp": 2}, "pp must be 1, got 2; plan with --str"),
        ("refshard", {"strategy": "fsdp1", "dp_shard": 4, "tp": 2}, "tp must be 1, got 2; plan with --str"),
        ("refshard", {"strategy": "ddp", "dp_shard": 4, "tp": 2}, "tp must be 1, got 2; plan with --str"),
        (
            "refshard", {"dp_shard": 4, "pp": 2, "schedule": "zero-bubble", "checkpointing": "full"},
            "'none' for schedule 'zero-bubble', got 'full'; plan with --checkpointing none or --schedule 1f1b",
        ),
        ("refshard", {"dp_shard": 8, "precision": "fp8"}, "precision must be 'bf16' or 'fp32', got 'fp8'"),
        ("refshard", {"model": "mixtral-8x7b", "dp_shard": 8}, "experts must be absent .* got a table; emit for"),
        ("megatron", {"model": "gemma3-1b", "strategy": "megatron", "dp_shard": 8}, "model: extra_norms must be false"),
        ("torchtitan", {"model": "gemma3-12b", "dp_shard": 8}, "dimensions of one of its flavors .*, got 48 layers"),
        (
            "accelerate", {"model": "mixtral-8x7b", "dp_shard": 8, "ep": 4},
            "ep must be 1, as it cannot divide experts over ranks, got 4; plan with --ep 1, or emit for torchtitan",
        ),
        (
            "megatron", {"model": "mixtral-8x7b", "strategy": "megatron", "dp_shard": 16, "ep": 16},
            "ep must divide the 8 experts, got 16; change --ep",
        ),
        ("torchtitan", {"model": "qwen3-30b-a3b", "dp_shard": 4, "dp_replicate": 2, "ep": 8}, "tp = 4, got 8"),
        ("torchtitan", {"model": "qwen3-30b-a3b", "strategy": "ddp", "dp_shard": 8, "ep": 8}, "must be 1, got 1 and 8"),
        (
            "deepspeed", {"model": "mixtral-8x7b", "dp_shard": 8, "dp_replicate": 2, "ep": 8},
            "dp_replicate must be 1 where ep = 8, got 2",
        ),
        ("torchtitan", {"model": "llama3.2-1b", "dp_shard": 4, "pp": 2}, "ties its embedding to its head, got 2"),
        ("megatron", {"strategy": "megatron", "dp_shard": 8, "tuning": "lora"}, "tuning must be 'full', got 'lora'"),
        ("torchtitan", {"dp_shard": 8, "precision": "mxfp8"}, "'fp8' or 'fp32', got 'mxfp8'; emit for megatron"),
        ("torchtitan", {"dp_shard": 8, "optimizer": "muon"}, "optimizer must be 'adamw', got 'muon'; emit for acc"),
        ("refshard", {"strategy": "megatron", "dp_shard": 8}, "strategy must be one that it runs, got 'megatron'"),
        (
            "refshard", {"strategy": "fsdp1", "dp_shard": 8, "compiled": True},
            "compiled must be false for fsdp1, got true; plan with --strategy fsdp2,refshard-fsdp",
        ),
        ("refshard", {"dp_shard": 8, "offload": True}, "offload must be false, got true"),
        ("fairscale", {"dp_shard": 8}, "no tool 'fairscale'; known: accelerate, deepspeed, megatron, "),
        ("torchtitan", {"dp_shard": 12}, "gpus: must be at most 8, or a multiple of it"),
    ],
)  # fmt: skip
def test_refusals_say_rule_value_and_remedy(tool: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        emit(tool, job(**fields))
    assert "; " in str(raised.value)


@pytest.mark.parametrize("strategy", PLANNED)
def test_every_strategy_of_plans_has_a_tool(strategy: str) -> None:
    asked = job(strategy=strategy, dp_shard=8)
    assert emit("refshard", asked).files
    assert [tool for tool in TOOLS if _runs(tool, asked)]


def _runs(tool: str, asked: Setting) -> bool:
    try:
        return bool(emit(tool, asked).files)
    except SpecError:
        return False


def test_suites_name_strategies_that_exist() -> None:
    assert not PLANNED_ONLY & ROWS.keys()
    assert {*COMPILED, *COMPILED.values()} <= ROWS.keys()
    staged = {"pp", "schedule", "cp"}
    assert all(staged - {"schedule"} <= ROWS[name].axes for name in STAGED)
    assert all("tp" in ROWS[name].axes for name in SPLIT)
    assert all("sequence_parallel" in ROWS[name].axes for name in SPLIT_BY_SEQUENCE)


@pytest.mark.parametrize("name", sorted(REFSHARD))
def test_a_suite_is_one_case_as_asked(name: str) -> None:
    asked = REFSHARD[name].job
    (text,) = emit("refshard", REFSHARD[name]).files.values()
    (case,) = parse_suite(text, "emitted").cases()
    assert (case.job.strategy, case.job.gpus, case.job.global_batch) == (
        asked.strategy,
        asked.gpus,
        asked.global_batch,
    )
    assert (case.protocol.fidelity, case.job.cluster, case.job.tp) == ("dryrun", "dgx-h100x32", asked.tp)
    assert (case.job.cp, case.job.pp) == (asked.cp, asked.pp)
    assert (case.job.interleave, case.job.schedule) == (asked.interleave, asked.schedule)
    assert case.job.sequence_parallel == (asked.tp > 1 and asked.strategy == "fsdp2")
    assert case.job.data_ranks == asked.data_ranks
    assert case.job.microbatches == asked.microbatches
    check_case(case, cuda=True)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"dp_shard": 8}, [0, 1, 2]),
        ({"dp_shard": 4, "pp": 2, "microbatches": 2}, [0, 1, 2, 16, 17, 18]),
        (
            {"dp_shard": 4, "pp": 2, "interleave": 8, "schedule": "interleaved", "microbatches": 2},
            [0, 1, 2, 3, 4, 6],
        ),
    ],
)
def test_layers_to_checkpoint_are_counted_on_each_rank_of_a_pipeline(fields: dict[str, Any], layers: list[int]) -> None:
    (text,) = emit("refshard", job(checkpointing="first-3", **fields)).files.values()
    (case,) = parse_suite(text, "emitted").cases()
    assert sorted(case.job.checkpointed(32).layers) == layers


def renamed(given: Setting, model: str) -> Setting:
    return msgspec.structs.replace(given, job=msgspec.structs.replace(given.job, model=model))


def test_a_model_that_is_no_preset_is_written_beside_the_suite(tmp_path: Path) -> None:
    given = job(dp_shard=8)
    found = emit("refshard", renamed(given, "mine.models:build"))
    (tmp_path / MODEL).write_text(found.files[MODEL])
    assert load_model(str(tmp_path / MODEL)) == given.model
    (case,) = parse_suite(found.files["refshard.toml"], "emitted").cases()
    assert case.job.model == MODEL
    assert any("not of its module" in note for note in found.notes)


@pytest.mark.parametrize(("fields", "on_meta"), [({}, True), ({"precision": "fp8"}, False), ({"tp": 2}, False)])
def test_accelerate_loads_on_the_meta_device_where_it_can(fields: dict[str, Any], on_meta: bool) -> None:
    found = emit("accelerate", job(dp_shard=8, **fields))
    assert f"fsdp_cpu_ram_efficient_loading: {str(on_meta).lower()}\n" in "".join(found.files.values())
    assert any("meta device of the others" in note for note in found.notes) == on_meta


@pytest.mark.parametrize("name", sorted(DEEPSPEED))
def test_deepspeed_clips_gradients_as_others_do(name: str) -> None:
    (text,) = emit("deepspeed", DEEPSPEED[name]).files.values()
    assert json.loads(text)["gradient_clipping"] == 1.0


def test_models_that_torchtitan_has_are_known_by_their_dimensions() -> None:
    for name in FLAVORS:
        assert preset(load_model(name), FLAVORS) == name


@pytest.mark.parametrize(
    "field", [{"expert_tp": 2}, {"stages": "4*8"}, {"graphs": "steps"}, {"recomputes": "mlp"}], ids=str
)
def test_what_only_closed_forms_know_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(field))}: no emitted configuration sets it, got .*; leave it at"):
        emit("megatron", job(strategy="megatron", dp_shard=4, pp=2, microbatches=4, **field))
