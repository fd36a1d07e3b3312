"""Specs: what is accepted, what is refused and in which words."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard import resources
from refshard.errors import SpecError
from refshard.specs.case import FIRST_NAMES, Case
from refshard.specs.model import load_model
from refshard.specs.reading import convert
from refshard.specs.suite import NetworkSpec, SuiteSpec, find_suite, load_suite


def case(**changes: Any) -> Case:
    fields = {"strategy": "ddp", "gpus": 2, "model": "llama-tiny", "global_batch": 4}
    return Case.of(**{**fields, **changes})


def suite(**changes: Any) -> SuiteSpec:
    fields = {
        "name": "s",
        "matrix": {"strategy": ["single", "ddp", "fsdp2"], "gpus": [1, 2], "model": ["llama-tiny"]},
        "case": {"global_batch": 4},
    }
    return convert({**fields, **changes}, SuiteSpec, where="suite")


def test_matrix_is_a_product_with_one_reference() -> None:
    cases = suite().cases()
    assert [(c.job.strategy, c.job.gpus) for c in cases] == [
        ("single", 1), ("ddp", 1), ("ddp", 2), ("fsdp2", 1), ("fsdp2", 2),
    ]  # fmt: skip


def test_a_reference_is_added_where_the_matrix_names_none() -> None:
    cases = suite(matrix={"strategy": ["ddp"], "gpus": [2], "model": ["llama-tiny"]}).cases()
    assert [c.job.strategy for c in cases] == ["single", "ddp"]
    assert cases[0] == cases[1].reference()


def test_batch_per_rank_scales_the_global_batch_and_each_has_its_own_reference() -> None:
    matrix = {"strategy": ["single", "ddp"], "gpus": [1, 2, 4], "model": ["llama-tiny"]}
    cases = suite(matrix=matrix, case={"batch_per_rank": 3}).cases()
    assert {(c.job.strategy, c.job.gpus, c.job.global_batch) for c in cases} == {
        ("single", 1, 3), ("ddp", 1, 3), ("single", 1, 6), ("ddp", 2, 6), ("single", 1, 12), ("ddp", 4, 12),
    }  # fmt: skip


def test_several_matrices_are_products_of_their_own_and_go_before_what_is_shared() -> None:
    several = suite(
        matrix=[
            {"strategy": ["ddp", "fsdp2"], "gpus": 2, "model": "llama-tiny"},
            {"strategy": "fsdp2", "gpus": [1, 2], "model": "llama-mini", "batch_per_rank": 1, "seq_len": 64},
        ],
        case={"global_batch": 4, "seq_len": 32},
    )
    assert [(c.job.strategy, c.job.gpus, c.job.model, c.job.global_batch, c.job.seq_len) for c in several.cases()] == [
        ("single", 1, "llama-tiny", 4, 32), ("ddp", 2, "llama-tiny", 4, 32), ("fsdp2", 2, "llama-tiny", 4, 32),
        ("single", 1, "llama-mini", 1, 64), ("fsdp2", 1, "llama-mini", 1, 64),
        ("single", 1, "llama-mini", 2, 64), ("fsdp2", 2, "llama-mini", 2, 64),
    ]  # fmt: skip
    assert several.strategies == ("single", "ddp", "fsdp2")
    assert not several.fixes_batch_per_rank


def test_a_table_of_lists_of_layers_is_crossed_by_list() -> None:
    crossed = suite(
        matrix={"strategy": "ddp", "gpus": 2, "model": "llama-tiny", "checkpointing": ["none", "full", [0, 2]]}
    )
    assert [c.job.checkpointing for c in crossed.cases()] == ["none", "none", "full", (0, 2)]


def test_a_table_may_have_rounds_of_its_own() -> None:
    tables = [
        {"strategy": "ddp", "gpus": 2, "model": "llama-tiny"},
        {"strategy": "fsdp2", "gpus": 2, "model": "llama-mini", "rounds": 1},
    ]
    uneven = suite(matrix=tables, rounds=3)
    assert uneven.most_rounds == 3
    assert [[c.job.model for c in uneven.cases(round_)] for round_ in range(4)] == [
        ["llama-tiny"] * 2 + ["llama-mini"] * 2, ["llama-tiny"] * 2, ["llama-tiny"] * 2, [],
    ]  # fmt: skip


def test_a_name_tells_the_axes_that_are_not_plain() -> None:
    assert case().name == "ddp-w2-llama-tiny-b4x256"
    assert case(workload="inference").name == "ddp-w2-llama-tiny-b4x256-inference"
    both = case(microbatches=2, checkpointing="every-2")
    assert both.axes == ("2 microbatches", "checkpointing every-2")
    assert both.name == "ddp-w2-llama-tiny-b4x256-2-microbatches-checkpointing-every-2"
    assert case(checkpointing=[0, 3]).axes == ("checkpointing of layers 0+3",)
    many = case(checkpointing=list(range(300)))
    assert many.axes == ("checkpointing of layers 0+1+2+3+4+5+6+7+...",)


def test_a_reference_neither_accumulates_nor_recomputes_but_infers_where_its_case_does() -> None:
    assert case(microbatches=2, checkpointing="full").reference() == case().reference()
    assert case(workload="inference").reference().job.workload == "inference"


def test_axes_are_named_and_left_out_of_the_hash_where_they_are_not_given() -> None:
    plain = case(strategy="fsdp2", gpus=8, global_batch=8)
    axes = {
        "precision": "bf16", "tuning": "qlora", "optimizer": "adamw-8bit", "offload": True, "dp_replicate": 2, "tp": 2,
        "sequence_parallel": True, "cp": 2, "pp": 2, "interleave": 2, "schedule": "interleaved", "comm_memory": "group",
        "lora_rank": 16, "lora_targets": "q_proj",
    }  # fmt: skip
    together = {
        "lora_rank": {"tuning"},
        "lora_targets": {"tuning"},
        "sequence_parallel": {"tp"},
        "interleave": {"pp", "schedule"},
        "schedule": {"pp", "interleave"},
    }
    newer = {*axes, "ep", "frozen", "implementation"}
    older = {FIRST_NAMES.get(name, name): value for name, value in plain.fields.items() if name not in newer}
    assert plain.hash == hashlib.sha256(msgspec.json.encode(older, order="sorted")).hexdigest()[:12]
    for name in axes:
        given = {name, *together.get(name, ())}
        changed = plain.changed(**{field: axes[field] for field in given})
        assert changed.hash != plain.hash
        assert changed.name != plain.name
    words = (
        "bf16", "qlora rank 16 on q_proj", "adamw-8bit", "offload", "2 replicas", "tensor parallel 2",
        "sequence parallel",
        "context parallel 2", "pipeline 2", "interleaved 2", "group memory",
    )  # fmt: skip
    every = plain.changed(gpus=32, global_batch=8, **axes)
    assert every.axes == words
    assert every.reference() == plain.reference().changed(
        tuning="qlora", lora_rank=16, lora_targets="q_proj", optimizer="adamw-8bit"
    )


def test_a_dry_run_is_one_process_of_a_world_of_any_size() -> None:
    dry = case(strategy="fsdp2", gpus=512, global_batch=64, tp=8, fidelity="dryrun", cluster="c")
    assert (dry.processes, dry.job.data_ranks) == (1, 64)
    assert dry.axes == ("tensor parallel 8", "dry run on c")
    assert dry.name.endswith("-tensor-parallel-8-dry-run-on-c")
    assert dry.reference().protocol.fidelity == "measured"
    assert suite(case={"model": "llama-tiny", "fidelity": "dryrun", "cluster": "c", "global_batch": 2}).cases() == (
        case(strategy="single", gpus=1, global_batch=2, fidelity="dryrun", cluster="c"),
        case(strategy="ddp", gpus=1, global_batch=2, fidelity="dryrun", cluster="c"),
        case(strategy="ddp", gpus=2, global_batch=2, fidelity="dryrun", cluster="c"),
        case(strategy="fsdp2", gpus=1, global_batch=2, fidelity="dryrun", cluster="c"),
        case(strategy="fsdp2", gpus=2, global_batch=2, fidelity="dryrun", cluster="c"),
    ), "no measured reference beside them"


def test_ranks_that_split_the_model_work_on_the_same_tokens() -> None:
    assert case(gpus=8, global_batch=8, tp=4).job.data_ranks == 2
    assert case(gpus=8, global_batch=8, dp_replicate=4).job.data_ranks == 8
    assert case(strategy="pipeline", gpus=8, global_batch=8).job.data_ranks == 1
    composed = case(strategy="fsdp2", gpus=32, global_batch=8, tp=2, cp=2, pp=4)
    assert composed.job.data_ranks == 2
    assert composed.job.stage_ranks == (0, 8, 16, 24)
    assert case(strategy="tensor-parallel", gpus=4, global_batch=1).job.data_ranks == 1


def test_hash_follows_content_and_survives_a_round_trip() -> None:
    again = msgspec.json.decode(msgspec.json.encode(case()), type=Case)
    assert again.hash == case().hash
    layers = case(checkpointing=[0, 2])
    assert msgspec.json.decode(msgspec.json.encode(layers), type=Case) == layers
    assert case(seed=1).hash != case().hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, r"case: gpus must be >= 1, got 0"),
        ({"warmup_steps": 9}, r"case: warmup_steps must be >= 10, got 9"),
        ({"global_batch": 3}, r"case: global_batch must be a multiple of gpus = 2, got 3"),
        ({"strategy": "single"}, r"case: gpus must be 1 for strategy 'single', got 2"),
        ({"gpus": "two"}, r"gpus must be a number >= 1, with k for 2\^10 or M for 2\^20, got 'two'; write 4 or 8k"),
        ({"device": "gpu"}, r"case: device: invalid enum value 'gpu'; known: auto, cpu, cuda \(got 'gpu'\)"),
        ({"seqlen": 5}, r"case has the unknown key 'seqlen'; did you mean 'seq_len'\?"),
        ({"time_limit_s": 0.0}, r"case: time_limit_s must be > 0 and finite, got 0.0"),
        ({"time_limit_s": float("nan")}, r"case: time_limit_s must be > 0 and finite, got nan"),
        ({"memory_limit_gib": float("inf")}, r"case: memory_limit_gib must be > 0 and finite, got inf"),
        ({"seed": -1}, r"case: seed must be >= 0, got -1"),
        ({"gpus": True}, r"case: gpus: expected `int`, got `bool`"),
        ({"learning_rate": 1.5}, r"case: learning_rate must lie between 0 and 1, got 1.5"),
        (
            {"microbatches": 4},
            r"case: global_batch must be a multiple of gpus \* microbatches = 2 \* 4, got 4",
        ),
        ({"microbatches": 0}, r"case: microbatches must be >= 1, got 0"),
        ({"dp_replicate": 3}, r"gpus must be a multiple of dp_replicate = 3, got 2"),
        (
            {"pp": 2, "tp": 2},
            r"gpus must be a multiple of tp \* pp = 2 \* 2, got 2",
        ),
        ({"sequence_parallel": True}, r"sequence_parallel must be false unless tp is 2 or more, got true"),
        ({"cp": 2, "seq_len": 6}, r"seq_len must be a multiple of 4, to be split over ranks, got 6"),
        ({"interleave": 2}, r"interleave must be 1 and schedule '1f1b' without a pipeline, got 2 and '1f1b'; set"),
        (
            {"pp": 2, "schedule": "interleaved"},
            r"interleave must be 1 for schedule '1f1b' and at least 2 for 'interleaved', got 1 for 'interleaved'",
        ),
        (
            {"fidelity": "emulated", "cluster": "a", "cp": 2},
            r"cp must be 1 for an emulated case, got 2; use fidelity 'dryrun'",
        ),
        (
            {"dp_replicate": 2},
            r"dp_replicate must leave 2 or more ranks to shard over, got 2 of 2; to shard nothing, use",
        ),
        (
            {"strategy": "pipeline", "tp": 2},
            r"tp must be 1 for strategy 'pipeline', which splits the model over all ranks, got 2",
        ),
        (
            {"fidelity": "emulated", "cluster": "a", "tp": 2},
            r"tp must be 1 for an emulated case, got 2; use fidelity 'dryrun'",
        ),
        (
            {"fidelity": "dryrun"},
            r"cluster must be given for emulated and dryrun cases and .* got fidelity 'dryrun' and cluster none",
        ),
        (
            {"fidelity": "dryrun", "cluster": "a", "device": "cpu"},
            r"device must be 'auto' or 'cuda' for dryrun cases, whose device is a GPU, got 'cpu'",
        ),
        (
            {"fidelity": "dryrun", "cluster": "a", "resident_ranks": 2},
            r"resident_ranks must be 1 unless emulated, got 2 for dryrun",
        ),
        (
            {"gpus": 4, "tp": 2, "global_batch": 3},
            r"global_batch must be a multiple of data-parallel ranks = 2, got 3",
        ),
        ({"precision": "fp8"}, r"precision must be 'fp32' or 'bf16' for a case, got 'fp8'"),
        ({"precision": "nvfp4"}, r"precision must be 'fp32' or 'bf16' for a case, got 'nvfp4'; only plans know nvfp4"),
        (
            {"comm_memory": "nvlink"},
            r"comm_memory: invalid enum value 'nvlink'; known: default, allocator, group, symmetric",
        ),
        ({"workload": "inference", "optimizer": "adamw-8bit"}, r"optimizer must be 'adamw' for workload 'inference'"),
        ({"frozen": "first-2,first-3"}, r"frozen must be some of embedding, head and one first-N, with commas between"),
        ({"frozen": "head", "tuning": "lora"}, r"tuning must be 'full' with frozen parts, got 'lora'"),
        ({"tuning": "lora", "optimizer": "muon"}, r"optimizer must not be 'muon' for tuning 'lora': Muon orthogonali"),
        (
            {"checkpointing": "half"},
            r"case: checkpointing must be 'none', 'full', 'selective', 'every-K', 'first-N' or .*, got 'half'",
        ),
        (
            {"checkpointing": "every-0"},
            r"checkpointing must be 'none', 'full', 'selective', 'every-K', .*, got 'every-0'",
        ),
        (
            {"checkpointing": [1, 1]},
            r"checkpointing must list one or more distinct layers, .* got \[1, 1\]; write 'none' for no",
        ),
        (
            {"checkpointing": [-1]},
            r"checkpointing must list one or more distinct layers, counted from 0, got \[-1\]",
        ),
        ({"checkpointing": []}, r"checkpointing must list one or more distinct layers, .* got \[\]"),
        ({"checkpointing": 3}, r"case: checkpointing: expected `str \| array`, got `int` \(got 3\)"),
        ({"workload": "serving"}, r"case: workload: invalid enum value 'serving'; known: training, inference"),
        (
            {"workload": "inference", "microbatches": 2},
            r"microbatches must be 1 for workload 'inference', which has no backward, got 2",
        ),
        (
            {"workload": "inference", "checkpointing": "full"},
            r"checkpointing must be 'none' for workload 'inference', which has no backward, got 'full'",
        ),
    ],
)
def test_a_bad_case_is_refused_with_field_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        case(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrx": {}}, r"suite: unknown key 'matrx'; did you mean 'matrix'\?"),
        ({"matrix": {"stratgy": ["ddp"]}}, r"matrix has the unknown key 'stratgy'; did you mean 'strategy'\?"),
        ({"matrix": {"strategy": []}}, r"matrix.strategy must be a value or a list of at least one, got \[\]"),
        ({"matrix": []}, r"matrix must hold at least one table, got \[\]"),
        ({"matrix": [{"strategy": ["ddp"]}, {"stratgy": "ddp"}]}, r"matrix has the unknown key 'stratgy'"),
        ({"matrix": {"rounds": [1, 2]}}, r"matrix.rounds must be an integer from 1 to 1000, got \[1, 2\]"),
        ({"matrix": {"rounds": 1001}}, r"matrix.rounds must be an integer from 1 to 1000, got 1001"),
        ({"case": {"rounds": 2}}, r"case has the unknown key 'rounds'"),
        ({"rounds": 0}, r"rounds must be >= 1, got 0"),
        ({"rounds": 10**9}, r"rounds must be <= 1000, got 1000000000"),
        ({"name": "a/../../b"}, r"name must be up to 64 letters.*got 'a/../../b'"),
        ({"name": ".."}, r"name must be up to 64 letters"),
    ],
)
def test_a_bad_suite_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        suite(**changes)


def networked(**changes: Any) -> SuiteSpec:
    fields = {
        "launcher": "netlab",
        "network": {"hosts": 2, "rate": "2gbit"},
        "matrix": {"strategy": ["single", "ddp"], "gpus": [2, 4], "model": ["llama-tiny"]},
        "case": {"global_batch": 4, "device": "cpu"},
    }
    return suite(**{**fields, **changes})


def test_a_suite_names_its_launcher_and_network() -> None:
    assert (suite().launcher, suite().network) == ("local", None)
    found = networked()
    assert found.network == NetworkSpec(hosts=2, rate="2gbit")
    assert [(c.job.strategy, c.job.gpus) for c in found.cases()] == [("single", 1), ("ddp", 2), ("ddp", 4)]
    assert msgspec.json.decode(msgspec.json.encode(found), type=SuiteSpec) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"network": None},
            r"suite: launcher 'netlab' needs the table \[network\], got none; add it, with hosts and rate",
        ),
        (
            {"launcher": "local"},
            r"suite: network needs launcher 'netlab', got launcher 'local'; set launcher = \"netlab\"",
        ),
        ({"launcher": "netlba"}, r"suite: launcher: invalid enum value 'netlba'; known: local, netlab"),
        ({"network": {"hosts": 2}}, r"suite: network.rate is missing; add it"),
        (
            {"network": {"hosts": 2, "rate": "2gbit", "rat": 1}},
            r"network has the unknown key 'rat'; did you mean 'rate'\?",
        ),
        ({"network": {"hosts": "two", "rate": "2gbit"}}, r"network.hosts: expected `int`, got `str` \(got 'two'\)"),
        ({"network": {"hosts": 1, "rate": "2gbit"}}, r"suite: network.hosts must be >= 2, got 1$"),
        ({"network": {"hosts": 65, "rate": "2gbit"}}, r"suite: network.hosts must be <= 64, got 65$"),
        *(
            (
                {"network": {"hosts": 2, "rate": rate}},
                rf"network.rate must be a whole number .* such as '2gbit', got '{rate}'$",
            )
            for rate in ("2 gbit", "0gbit", "1.5gbit", "2gb", "2Gbit", "99999gbit", "-2gbit")
        ),
    ],
)
def test_a_bad_network_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        networked(**changes)


def test_ranks_that_cannot_be_spread_evenly_are_refused() -> None:
    with pytest.raises(SpecError, match=r"gpus must be 1 or a multiple of network.hosts = 3, got 2; change either"):
        networked(network={"hosts": 3, "rate": "2gbit"}).cases()


def test_a_network_is_for_cpus_since_nccl_would_go_around_it() -> None:
    with pytest.raises(SpecError, match=r"device must be 'cpu' with launcher 'netlab', got 'auto'"):
        networked(case={"global_batch": 4}).cases()


@pytest.mark.parametrize(
    ("rate", "bits_per_s", "words"),
    [
        ("2gbit", 2 * 10**9, "2 hosts joined at 2 Gbit/s (network namespaces)"),
        ("250mbit", 250 * 10**6, "2 hosts joined at 250 Mbit/s (network namespaces)"),
    ],
)
def test_a_rate_in_bits_per_second_and_in_words(rate: str, bits_per_s: int, words: str) -> None:
    found = NetworkSpec(hosts=2, rate=rate)
    assert (found.bits_per_s, found.description) == (bits_per_s, words)


@pytest.mark.parametrize(("hosts", "world_size", "per_host"), [(2, 1, 1), (2, 2, 1), (2, 4, 2), (3, 9, 3)])
def test_ranks_are_spread_evenly(hosts: int, world_size: int, per_host: int) -> None:
    assert NetworkSpec(hosts=hosts, rate="1gbit").ranks_per_host(world_size) == per_host


def test_a_case_needs_one_batch_size() -> None:
    for shared in ({}, {"global_batch": 2, "batch_per_rank": 2}):
        with pytest.raises(
            SpecError, match="exactly one of global_batch, batch_per_rank, microbatch must be given, got"
        ):
            suite(case=shared).cases()


def test_a_missing_required_field_is_named() -> None:
    with pytest.raises(SpecError, match=r"case: strategy is missing; add it"):
        suite(matrix={"gpus": [1], "model": ["llama-tiny"]}).cases()


def test_damaged_and_missing_toml(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("name = \n")
    with pytest.raises(SpecError, match=r"bad.toml: not valid TOML \(.*line 1.*\); correct that line"):
        load_suite(path)
    with pytest.raises(SpecError, match=r"none.toml: cannot be read \(No such file or directory\)"):
        load_suite(tmp_path / "none.toml")


def test_suites_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("")
    assert find_suite(str(own)) == own
    assert find_suite("quickstart") == resources.suites()["quickstart"]
    assert find_suite("suites/quickstart.toml").name == "quickstart.toml"
    with pytest.raises(SpecError, match=r"suite: no such file or suite 'quickstrat'; did you mean 'quickstart'\?"):
        find_suite("quickstrat")


def test_every_shipped_suite_expands() -> None:
    for path in resources.suites().values():
        assert load_suite(path).cases()


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(SpecError, match=r"model: no preset 'llama-tniy'; did you mean 'llama-tiny'\?"):
        load_model("llama-tniy")
    with pytest.raises(SpecError, match=r"model: no preset 'acme/x'; refshard list models shows all"):
        load_model("acme/x")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("google/gemma-3-4b-it", "gemma3-4b"),
        ("Llama_3.2_1B", "llama3.2-1b"),
        ("llama-3.1-8b", "llama3.1-8b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4-scout"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
        ("zai-org/GLM-4.5-Air-Base", "glm4.5-air"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi3.5-mini"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-1.7b"),
    ],
)
def test_names_of_models_that_people_type(name: str, preset: str) -> None:
    assert load_model(name) == load_model(preset)
    assert case(model=name) == case(model=preset)


def test_a_folder_goes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(SpecError, match=r"Qwen/Qwen3-8B/config.json: model_type must be one of"):
        load_model("Qwen/Qwen3-8B")


def test_tokens_of_a_sequence_and_names_may_be_written_as_people_do() -> None:
    assert case(seq_len="8k").job.seq_len == 8192
    emulated = case(fidelity="emulated", cluster="16xH100", gpus=16, global_batch=16)
    assert emulated.job.cluster == "dgx-h100x2"


def test_a_word_that_a_list_does_not_allow_is_refused_with_those_that_it_does(tmp_path: Path) -> None:
    from refshard.specs.cluster import load_cluster

    profile = (resources.root() / "profiles" / "clusters" / "dgx-a100.toml").read_text()
    (tmp_path / "odd.toml").write_text(profile.replace('["ring", "tree"]', '["ring", "star"]'))
    with pytest.raises(SpecError, match=r"algorithms.1: invalid enum value 'star'; known: ring, tree, hierarchical"):
        load_cluster(str(tmp_path / "odd.toml"))


def test_only_the_cases_that_are_named_are_kept_with_their_references() -> None:
    matrix = {"strategy": ["ddp", "fsdp2"], "gpus": [2, 4], "model": ["llama-tiny"]}
    every = suite(matrix=matrix).cases()
    ddp = next(case for case in every if (case.job.strategy, case.job.gpus) == ("ddp", 4))
    for name in (ddp.name, ddp.hash, ddp.hash[:4]):
        assert suite(matrix=matrix, only=[name]).cases() == (ddp.reference(), ddp)
    assert suite(matrix=matrix, only=[ddp.reference().name]).cases() == (ddp.reference(),)


def test_a_record_of_a_suite_holds_what_was_given_and_reads_back() -> None:
    """A key that older readers do not know is there only where it is used."""
    for made, keys in (
        (suite(), {"name", "matrix", "case"}),
        (suite(only=["ddp"]), {"name", "matrix", "case", "only"}),
    ):
        written = msgspec.json.encode(made)
        assert msgspec.json.decode(written).keys() == keys
        assert msgspec.json.decode(written, type=SuiteSpec) == made


@pytest.mark.parametrize("name", ["ddp-w8-llama-tiny-b4x256", "ddp", ""])
def test_a_name_that_is_no_case_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"only: suite 's' has no case '{name}'; "):
        suite(only=[name]).cases()


def test_first_layers_are_those_of_each_pipeline_rank_and_no_more_than_it_has() -> None:
    piped = {"strategy": "fsdp2", "gpus": 6, "global_batch": 8, "pp": 3, "microbatches": 2}
    job = case(**{**piped, "checkpointing": "first-2"}).job
    assert sorted(job.checkpointed(7).layers) == [0, 1, 2, 3, 5, 6]
    with pytest.raises(SpecError, match="its number must be at most the 3 layers, got 'first-4'; lower it"):
        case(**{**piped, "checkpointing": "first-4"}).job.checkpointed(7)
