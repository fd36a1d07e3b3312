"""``refshard plan`` as a user meets it."""

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from refshard.cli import app, main
from refshard.commands.plan import PLANNED, SEARCHED, Options, plan
from refshard.emit.table import POLICIES, RUNS, TOOLS
from refshard.errors import SpecError
from refshard.plan.cost_models import COST_MODELS
from refshard.quantities import parse_count
from refshard.specs.suite import parse_suite
from refshard.strategies import check_case
from tests.emit.megatron_flags import FLAGS
from tests.emit.test_structure import megatron_words
from tests.report.pages import Page
from tests.report.printed import as_csv, as_json, notes, rows, tables, text, verdict

pytestmark = pytest.mark.slow

SHORT = ["plan", "--model", "llama3-8b", "--cluster", "dgx-h100x2", "--seq-len", "4096"]


def options(**changes: Any) -> Options:
    """8B on 16 GPUs, with two strategies."""
    fields = {
        "model": "llama3-8b", "cluster": "dgx-h100x2", "seq_len": 4096, "strategies": "refshard-yafsdp,ddp",
        "dry_runs": 0,
    }  # fmt: skip
    return Options(**{**fields, **changes})


def sizes(**changes: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = as_json(plan(options(**changes)))["sizes"]
    return found


def named(found: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """The same sizes of a model of another name."""
    return json.loads(json.dumps(found).replace('"llama3-8b"', json.dumps(model)))  # type: ignore[no-any-return]


def configurations(**changes: Any) -> list[dict[str, Any]]:
    """Those of the last size, best first; fields that are as by default are left out."""
    last = sizes(**changes)[-1]
    jobs = [row["job"] for row in [*last["rows"], *last["unfit"]]]
    return [{**job.pop("implementation", {}), **job} for job in jobs]


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*SHORT, *words])
    return done.exit_code, done.output


@pytest.mark.processes
def test_405b_on_16384_gpus_in_n_dimensions_takes_seconds_and_no_torch() -> None:
    """The command that the README shows, in a process of its own; the goals are 5 s and 1 GiB."""
    script = (
        "import sys\nsys.argv = ['refshard', 'plan', '--model', 'llama3.1-405b', '--cluster', 'dgx-h100', "
        "'--gpus', '2048..16384', '--search', '--dry-runs', '0', '--json']\n"
        "from refshard.cli import app\n"
        "app(standalone_mode=False)\n"
        "print('torch' in sys.modules or 'pandas' in sys.modules, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    told = json.loads(done.stdout)
    assert done.stderr.strip() == "False"
    assert [size["gpus"] for size in told["sizes"]] == [2048, 4096, 8192, 16384]
    assert told["tokens_per_step"] == 16 * 2**20
    for size in told["sizes"]:
        assert size["rows"]
        assert size["considered"] > 100
        best = size["rows"][0]
        assert best["job"]["tp"] > 1
        assert 0.2 < best["mfu"] < 0.6
    assert told["verdict"][0].startswith("Use ")
    assert spent < 60, "a bound that only a mistake in the order of growth would break"


def test_the_answer_comes_first_then_ties_or_what_is_next_and_status_0() -> None:
    found = plan(options(strategies="refshard-yafsdp,fsdp2,fsdp1"))
    assert found.status == 0
    first, second, *_ = verdict(found)
    assert first.startswith("Use ")
    assert " per step, " in first
    assert second.startswith(("Tied within the model's error: ", "Next: "))
    assert text(found).startswith("Use ")
    (summary, *_) = tables(found, detail=False)
    assert summary.title.startswith("llama3-8b on dgx-h100x2: 16 sequences of 4,096 tokens a step (65,536 tokens)")
    assert {row["strategy"] for row in rows(summary)} == {"refshard-yafsdp", "fsdp2", "fsdp1"}
    fastest_peer, *steps = [float(row["step_s"]) for row in as_csv(found)]
    assert as_csv(found)[0]["strategy"] == "fsdp2", "which GPUs have measured; the engine's lead is within the error"
    assert fastest_peer > steps[0]
    assert steps == sorted(steps)


def test_without_strategies_torchs_and_the_engines_are_planned_and_a_search_takes_those_that_scale() -> None:
    def planned(**changes: Any) -> set[str]:
        return {one["strategy"] for one in configurations(strategies=None, top=100, **changes)}

    assert planned() == {*PLANNED}
    assert planned(search=True, tp="1", pp="1", cp="1", microbatch="1") == {*SEARCHED}
    assert {*PLANNED, *SEARCHED} <= COST_MODELS.keys()


def test_axes_take_one_several_or_all_sizes() -> None:
    def of(axis: str, **changes: Any) -> set[int]:
        return {one.get(axis, 1) for one in configurations(strategies="fsdp2", microbatches=16, top=99, **changes)}

    assert of("tp") == {1}
    assert of("tp", tp="2,4") == {2, 4}
    assert of("tp", tp="all") == {1, 2, 4, 8}
    assert of("pp", pp="1, 4") == {1, 4}
    assert of("cp", cp="2") == {2}
    assert of("tp", search=True, tokens_per_step=2**20) == {1, 2, 4, 8}


def test_precision_and_other_settings_reach_every_configuration() -> None:
    (one,) = configurations(strategies="fsdp2", precision="fp8", reduction="bf16", compiled="yes", offload=True)
    assert (one["precision"], one["reduction"], one["compiled"], one["offload"]) == ("fp8", "bf16", True, True)
    (hybrid,) = configurations(strategies="fsdp2", dp_replicate="2", microbatch="2", microbatches=3)
    assert (hybrid["dp_replicate"], hybrid["global_batch"], hybrid["microbatches"]) == (2, 2 * 3 * 16, 3)
    (piped,) = configurations(
        strategies="megatron", pp="4", interleave="2", schedule="interleaved", microbatches=8, tp="2"
    )
    assert (piped["schedule"], piped["interleave"], piped["tp"]) == ("interleaved", 2, 2)


def test_precisions_and_compilation_are_lists_and_a_search_takes_neither_unless_asked() -> None:
    def variants(**changes: Any) -> set[tuple[str, bool]]:
        found = configurations(strategies="fsdp2", top=99, **changes)
        return {(one.get("precision", "bf16"), one.get("compiled", False)) for one in found}

    every = {("bf16", False), ("bf16", True), ("fp8", False), ("fp8", True)}
    assert variants(precision="bf16,fp8", compiled="both") == every
    assert variants(precision="fp8", compiled="yes") == {("fp8", True)}
    assert variants() == variants(search=True, tokens_per_step=2**20) == {("bf16", False)}
    assert variants(precision="fp8,bf16,fp8", search=True, tokens_per_step=2**20) == {("bf16", False), ("fp8", False)}


def test_a_tool_without_fp8_gets_the_best_row_in_bf16(tmp_path: Path) -> None:
    found = plan(options(strategies="fsdp2", precision="bf16,fp8"), tool="deepspeed", out=tmp_path)
    assert json.loads((tmp_path / "ds_config.json").read_text())["bf16"] == {"enabled": True}
    assert "(fsdp2 in bf16 with FSDP 16)" in " ".join(text(found).split())
    plan(options(strategies="fsdp2", precision="bf16,fp8", compiled="both"), tool="torchtitan", out=tmp_path)
    module = (tmp_path / "refshard_torchtitan.py").read_text()
    assert "Float8LinearConverter.Config(" in module
    assert "CompileConfig(enable=True" in module


def test_layers_to_checkpoint_by_number_by_word_or_as_few_as_fit() -> None:
    def checkpointed(**changes: Any) -> int:
        return int(sizes(strategies="refshard-yafsdp", **changes)[0]["rows"][0]["checkpointed"])

    assert checkpointed(checkpointing="first-10") == 10
    assert checkpointed(checkpointing="none") == 0
    assert checkpointed(checkpointing="every-2") == 16
    assert checkpointed(checkpointing="full") == checkpointed(checkpointing="selective") == 32
    assert checkpointed() == 0
    assert 0 < checkpointed(seq_len=16384) < 32
    assert len(configurations(strategies="fsdp2", checkpointing="none,full")) == 1, "one of each family"


@pytest.mark.parametrize(
    ("gpus", "ranks"),
    [
        ("8", [8]), ("512,64,64,4", [4, 64, 512]), ("8..64", [8, 16, 32, 64]), ("24..100", [24, 48, 96]),
        (" 16 , 32 ", [16, 32]),
        (None, [16]),
    ],
)  # fmt: skip
def test_numbers_of_gpus_are_a_list_or_a_range_that_doubles(gpus: str | None, ranks: list[int]) -> None:
    found = sizes(gpus=gpus)
    assert [size["gpus"] for size in found] == ranks
    for size in found:
        for row in [*size["rows"], *size["unfit"]]:
            assert row["job"]["gpus"] == size["gpus"]


@pytest.mark.parametrize(
    ("names", "cluster", "gpus"),
    [
        ({"model": "meta-llama/Meta-Llama-3-8B-Instruct", "cluster": "16xH100"}, "dgx-h100x2", 16),
        ({"model": "LLAMA3-8B", "cluster": "dgx-h100x8", "gpus": "16"}, "dgx-h100x2", 16),
        ({"model": "LLAMA3-8B", "cluster": "dgx-h100x8", "nodes": 2}, "dgx-h100x2", 16),
        ({"cluster": "4xh100", "nodes": 2}, "4xdgx-h100x2", 8),
        ({"cluster": "16xh100"}, "dgx-h100x2", 16),
        ({"cluster": "4xh100"}, "4xdgx-h100", 4),
        ({"cluster": "h100", "gpus": "32"}, "dgx-h100x4", 32),
        ({"cluster": "h100", "gpus": "2"}, "dgx-h100x1", 2),
    ],
)
def test_a_model_and_a_cluster_may_be_called_by_any_name(names: dict[str, Any], cluster: str, gpus: int) -> None:
    found = configurations(**names)
    assert {(job["model"], job["cluster"], job["gpus"]) for job in found} == {("llama3-8b", cluster, gpus)}


def test_the_price_and_failures_reach_the_costs() -> None:
    def best(**changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = sizes(strategies="refshard-yafsdp", **changes)[0]["rows"][0]
        return found

    cheap, dear = best(price_usd=1.0), best(price_usd=3.0)
    assert dear["cost_usd"] == pytest.approx(3 * cheap["cost_usd"])
    assert best(mtbf_hours=100.0)["goodput"] < cheap["goodput"] < 1
    assert best(mtbf_hours=100.0)["step_s"] == cheap["step_s"]


@given(count=st.integers(1, 10**6), factor=st.sampled_from(["", "k", "K", "m", "M"]), space=st.sampled_from(["", " "]))
def test_tokens_are_a_number_with_a_factor_of_two_to_the_tenth(count: int, factor: str, space: str) -> None:
    assert parse_count(f"{space}{count}{factor}{space}") == count * {"": 1, "K": 1024, "M": 1024**2}[factor.upper()]


def test_tokens_of_a_step_set_the_batch_of_every_size() -> None:
    found = plan(options(gpus="8,16", tokens_per_step=2**19, microbatch="all", strategies="fsdp2"))
    assert as_json(found)["global_batch"] == 128
    for line in as_csv(found):
        assert int(line["global_batch"]) == 128
        data_ranks = int(line["gpus"]) // int(line["tp"])
        assert data_ranks * int(line["microbatch"]) * int(line["microbatches"]) == 128


def test_axes_that_are_not_given_take_what_costs_little_to_look_at() -> None:
    """Replicas in any case; tensor parallelism and microbatches where the batch is given; all others if searched."""

    def sizes(**fields: Any) -> dict[str, set[int]]:
        rows = as_csv(plan(options(strategies="fsdp2", cluster="h100-eth100", gpus="32", top=500, **fields)))
        axes = ("dp_replicate", "tp", "microbatch", "pp", "cp")
        return {axis: {int(row[axis]) for row in rows} for axis in axes}

    plain, of_a_batch = sizes(), sizes(tokens_per_step=2**20)
    assert max(plain["dp_replicate"]) > 1
    assert max(of_a_batch["tp"]) > 1
    assert max(of_a_batch["microbatch"]) > 1
    assert [plain[axis] for axis in ("tp", "microbatch", "pp", "cp")] == [{1}] * 4
    assert of_a_batch["pp"] == of_a_batch["cp"] == {1}
    assert max(sizes(tokens_per_step=2**20, search=True, dry_runs=0)["pp"]) > 1


@pytest.mark.parametrize(("model", "tokens"), [("llama3-8b", 4 * 2**20), ("llama3.1-405b", 16 * 2**20)])
def test_a_search_takes_the_batch_that_such_models_are_trained_with(model: str, tokens: int) -> None:
    found = as_json(plan(options(model=model, search=True, strategies="megatron", microbatch="1", gpus="256")))
    assert found["tokens_per_step"] == tokens


def test_a_model_may_be_a_file_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text((Path(__file__).parents[2] / "profiles/models/llama3-8b.toml").read_text())
    assert sizes(model=str(mine)) == named(sizes(), str(mine))
    with pytest.raises(SpecError, match=r"none\.toml: cannot be read"):
        plan(options(model=str(tmp_path / "none.toml")))


def test_a_page_can_be_written_and_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    found = plan(options(), page=tmp_path / "plan.html")
    seen = Page((tmp_path / "plan.html").read_text())
    assert "llama3-8b on dgx-h100x2" in seen.text
    assert verdict(found)[0].split(":")[0] in " ".join(seen.text.split())
    with pytest.raises(SpecError, match=r"cannot be written \(No such file or directory\); name a writable file"):
        plan(options(), page=tmp_path / "none" / "plan.html")
    with pytest.raises(SpecError, match=r"html: .* cannot be written \(Is a directory\); name a writable file"):
        plan(options(), page=tmp_path)


def test_the_status_says_whether_anything_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--strategy", "fsdp2")[0] == 0
    code, shown = run("--model", "llama3.1-405b", "--strategy", "ddp")
    assert code == 1
    assert shown.startswith("Nothing fits: ")
    assert "Closest: ddp with DP 16" in " ".join(shown.split())
    code, shown = run("--microbatch", "3", "--tokens-per-step", "512k")
    assert code == 1
    assert "No configuration can run: no choice of axes divides" in " ".join(shown.split())
    with pytest.raises(SystemExit) as refused:
        main([*SHORT, "--strategy", "fsdp3"])
    assert refused.value.code == 2
    assert (
        capsys.readouterr().err == "refshard: strategy: no strategy 'fsdp3' has a closed form; did you mean 'fsdp2'?\n"
    )


@pytest.mark.parametrize(
    ("axes", "rule"),
    [
        ({"ep": "2"}, "ep splits experts, and llama3-8b has none, got 2; leave --ep out"),
        ({"model": "mixtral-8x7b", "ep": "16"}, "ep must divide the 8 experts of mixtral-8x7b, got 16; change --ep"),
        ({"tp": "16"}, "tp must be <= 8, the GPUs of a node, got 16; change --tp"),
        ({"tp": "3"}, "tp must divide the heads of llama3-8b, 32, got 3; change --tp"),
        ({"pp": "8", "cp": "4"}, "tp x cp x pp must divide 16 ranks, got 1 x 4 x 8; change an axis or --gpus"),
    ],
)
def test_an_axis_that_splits_nothing_is_named_with_its_rule(axes: dict[str, str], rule: str) -> None:
    with pytest.raises(SpecError) as refused:
        plan(options(**axes))
    assert str(refused.value) == rule


def test_options_of_the_command_line_are_those_that_are_asked_with() -> None:
    words = "--strategy megatron --tokens-per-step 1M --tp 2 --pp 4 --interleave 2 --schedule interleaved"
    code, shown = run(*words.split(), "--json", "--microbatch=1", "--gpus=16", "--usd-per-gpu-hour=1", "--mtbf", "1000")
    assert code == 0
    told = json.loads(shown)
    assert told["price_usd_per_gpu_hour"] == 1
    assert told["failures"]["mtbf_hours"] == 1000
    one = told["sizes"][0]["rows"][0]["job"]
    assert (one["strategy"], one["tp"], one["pp"], one["interleave"]) == ("megatron", 2, 4, 2)
    assert told["tokens_per_step"] == 2**20


def test_all_fields_of_json_and_csv_are_there_whatever_fits() -> None:
    some, none = plan(options()), plan(options(model="llama3.1-405b"))
    assert as_json(some).keys() == as_json(none).keys()
    assert not as_csv(none)
    assert {"gpus", "strategy", "step_s", "peak_bytes", "compute_s", "cost_usd"} <= as_csv(some)[0].keys()


def test_more_or_fewer_rows_are_listed() -> None:
    assert len(sizes(strategies=None, top=2)[0]["rows"]) == 2
    whole, cut = (plan(options(strategies=None, top=top)) for top in (100, 2))
    assert verdict(whole)[0] == verdict(cut)[0]


def read(tool: str, files: dict[str, Path]) -> Any:
    """What the tool would read, by a parser of its format."""
    ((name, path),) = files.items()
    shown = path.read_text()
    if tool == "torchtitan":
        return ast.parse(shown)
    if tool == "megatron":
        given = {word.removeprefix("--") for word in megatron_words(shown) if word.startswith("--")}
        assert given <= FLAGS.keys()
        return given
    if tool == "refshard":
        return parse_suite(shown, name).cases()
    return yaml.safe_load(shown) if tool == "accelerate" else json.loads(shown)


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_the_first_configuration_that_a_tool_runs_is_written_for_it(tool: str, tmp_path: Path) -> None:
    found = plan(
        options(strategies=None, checkpointing="none,full", seq_len=2048), tool=tool, out=tmp_path / "new" / "folder"
    )
    assert found.status == 0
    files = {path.name: path for path in (tmp_path / "new" / "folder").iterdir()}
    assert read(tool, files)
    shown = " ".join(text(found).split())
    assert f"Written for {tool} " in shown
    assert all(name in shown for name in files)
    assert "Start it with: " in shown
    if tool in RUNS:
        assert {one["strategy"] for one in (row["job"] for row in as_json(found)["sizes"][0]["rows"])} <= {*RUNS[tool]}


def test_a_plan_for_a_tool_goes_on_to_the_first_row_that_it_can_run(tmp_path: Path) -> None:
    """DeepSpeed has no tensor parallelism, which is faster here than to compute every layer again."""
    changes = {"seq_len": 12288, "tp": "1,2", "checkpointing": "none,full", "strategies": "fsdp2"}
    best, next_ = (row["job"] for row in sizes(**changes)[0]["rows"])
    assert (best["tp"], best.get("checkpointing", "none")) == (2, "none")
    assert (next_.get("tp", 1), next_["checkpointing"]) == (1, "full")
    found = plan(options(**changes), tool="deepspeed", out=tmp_path)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["train_batch_size"] == 16
    assert "(fsdp2 with FSDP 16)" in " ".join(text(found).split())


def test_a_search_for_megatron_gives_it_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    found = plan(options(search=True, strategies="megatron", tokens_per_step=2**20), tool="megatron", out=tmp_path)
    (script,) = tmp_path.iterdir()
    given = megatron_words(script.read_text())
    sizes_of = {flag: int(given[given.index(flag) + 1]) for flag in ("--global-batch-size", "--seq-length")}
    assert sizes_of == {"--global-batch-size": 256, "--seq-length": 4096}
    assert found.status == 0


@pytest.mark.parametrize(
    "axes",
    [
        {"pp": "2", "interleave": "1", "schedule": "1f1b"},
        {"pp": "4", "interleave": "2", "schedule": "interleaved", "tp": "2"},
        {"pp": "2", "interleave": "1", "schedule": "zero-bubble", "dp_replicate": "2", "seq_len": 1024},
        {"cp": "2", "tp": "2"},
        {"pp": "2", "cp": "2", "tp": "2", "schedule": "1f1b", "seq_len": 16384},
    ],
)
def test_a_suite_for_refshard_has_every_axis_and_can_be_dry_run(axes: dict[str, Any], tmp_path: Path) -> None:
    found = plan(options(strategies="fsdp2", microbatches=8, **axes), tool="refshard", out=tmp_path)
    one = as_json(found)["sizes"][-1]["rows"][0]["job"]
    (case,) = parse_suite((tmp_path / "refshard.toml").read_text(), "emitted").cases()
    for field, of_case in (("tp", case.job.tp), ("cp", case.job.cp),
                           ("pp", case.job.pp), ("interleave", case.job.interleave)):  # fmt: skip
        assert of_case == one.get(field, 1) == int(axes.get(field, 1))
    assert case.job.schedule == one.get("schedule", "1f1b")
    assert case.job.sequence_parallel == (case.job.tp > 1)
    assert (case.job.dp_replicate, case.job.microbatches) == (one.get("dp_replicate", 1), one["microbatches"])
    check_case(case, cuda=True)


def test_megatron_gets_a_pipeline_in_a_schedule_that_it_has(tmp_path: Path) -> None:
    """Megatron-LM has no zero bubble."""
    found = plan(options(strategies="megatron", pp="4", microbatches=8), tool="megatron", out=tmp_path)
    best = as_json(found)["sizes"][-1]["rows"][0]["job"]
    words = megatron_words((tmp_path / "pretrain.sh").read_text())
    assert words[words.index("--pipeline-model-parallel-size") + 1] == "4" == str(best["pp"])
    assert best.get("schedule", "1f1b") == "1f1b"
    assert "megatron with ZeRO-1 4 x PP 4 (1F1B)" in " ".join(text(found).split())


def test_a_factory_is_planned_by_its_dimensions_and_refused_if_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planned_models.py").write_text(
        "import torch\nfrom refshard.models.llama import Llama\nfrom refshard.specs.model import load_model\n\n"
        "def build():\n    return Llama(load_model('llama3-8b'))\n\n"
        "def other():\n    return torch.nn.Linear(3, 3), None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = plan(options(model="planned_models:build", strategies="fsdp2"), tool="refshard", out=tmp_path / "out")
    assert as_json(found)["sizes"] == named(sizes(strategies="fsdp2"), "planned_models:build")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"refshard.toml", "model.toml"}
    with pytest.raises(SpecError, match=r"the batch of 'planned_models:other' must be a function, got NoneType"):
        plan(options(model="planned_models:other"))


COUNTED = "tests.dryrun.counted_small:build"


def test_a_module_without_dimensions_is_planned_by_its_operators() -> None:
    found = as_json(plan(options(model=COUNTED, seq_len=64, search=True, tokens_per_step=2**12)))["sizes"][-1]
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"operators counted, data parallel, bf16, Hopper"}
    assert {row["flops_convention"] for row in rows} == {"counted"}
    assert all(row["low_s"] is None and row["fits"] for row in rows)
    assert {row["job"]["strategy"] for row in rows} == {"ddp", "refshard-yafsdp"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": "2"}, "tp must be 1 for '.*', whose operators are counted, got 2"),
        ({"pp": "2", "microbatch": "1", "microbatches": 2}, "pp must be 1 for"),
        ({"tuning": "lora"}, "tuning must be full for '.*', whose operators are counted, got lora"),
        ({"optimizer": "muon", "strategies": "ddp"}, "optimizer must be adamw or adamw-8bit or sgd for"),
        ({"precision": "fp8"}, "precision must be bf16 or fp32 for '.*', whose operators are counted, got fp8"),
        ({"compiled": "yes"}, "can neither be compiled nor checkpointed by operator"),
        ({"checkpointing": "selective"}, "can neither be compiled nor checkpointed by operator"),
        ({"strategies": "megatron"}, "strategy must be .* for '.*', whose operators are counted, got megatron"),
        ({"dry_runs": 2}, "within a plan they are of models with dimensions"),
    ],
)
def test_a_module_without_dimensions_has_no_other_closed_forms(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan(options(model=COUNTED, seq_len=64, **given))


def test_nothing_is_emitted_for_a_module_without_dimensions(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="emit: torchtitan needs the dimensions of a model"):
        plan(options(model=COUNTED, seq_len=64), tool="torchtitan", out=tmp_path)


@pytest.mark.parametrize(("tool", "policies"), sorted(POLICIES.items()))
def test_a_tool_that_cannot_checkpoint_some_layers_gets_a_plan_without_them(
    tool: str, policies: tuple[str, ...], tmp_path: Path
) -> None:
    found = plan(options(model="llama3-70b", cluster="dgx-h100x4", strategies="fsdp2"), tool=tool, out=tmp_path)
    chosen = {row["job"].get("checkpointing", "none") for row in as_json(found)["sizes"][0]["rows"]}
    assert chosen <= {*policies}
    assert "full" in chosen
    with pytest.raises(SpecError, match=r"got 'first-\d+'; plan with --checkpointing none,"):
        plan(
            options(model="llama3-70b", cluster="dgx-h100x4", strategies="fsdp2", checkpointing="auto"),
            tool=tool, out=tmp_path,
        )  # fmt: skip


def test_what_is_emitted_goes_to_runs_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, shown = run("--emit", "deepspeed", "--strategy", "fsdp2", "--checkpointing", "full")
    assert code == 0
    (path,) = (tmp_path / "runs" / "emitted" / "deepspeed").iterdir()
    assert f"runs/emitted/deepspeed/{path.name}" in shown


def test_a_tool_that_runs_nothing_of_the_plan_says_why(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"megatron: strategy must be one that it runs .*, got 'fsdp2'; name one"):
        plan(options(strategies="fsdp2"), tool="megatron", out=tmp_path / "a")
    with pytest.raises(SpecError, match="emit: no configuration fits, so there is nothing to write for torchtitan"):
        plan(options(model="llama3.1-405b", strategies="fsdp2"), tool="torchtitan", out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"out: .*file cannot be written \(.*\); name a writable folder"):
        plan(options(strategies="fsdp2"), tool="refshard", out=tmp_path / "file")


def test_what_a_tool_takes_beyond_the_plan_must_fit_too(tmp_path: Path) -> None:
    one = {"model": "llama3.2-1b", "cluster": "dgx-h100", "strategies": "fsdp2", "checkpointing": "none"}
    with pytest.raises(SpecError, match=r"accelerate takes 6\.\d+ GiB more than the plan's 7\d.* GiB, too much for 77"):
        plan(options(**one, microbatch="6"), tool="accelerate", out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    found = plan(options(**one, microbatch="3"), tool="accelerate", out=tmp_path / "a")
    assert "Norms of transformers' models keep copies in fp32: 3.09 GiB more than the plan's." in text(found)


def test_an_implementation_is_stated_by_field() -> None:
    split = {"model": "llama3-70b", "cluster": "dgx-h100x8", "strategies": "fsdp2", "tokens_per_step": 2**20, "pp": "4"}
    rows = configurations(**split, implementation=("stages=22,21,21,16", "fused_norms=0"))
    assert {(one["stages"], one["fused_norms"], one["pp"], one.get("interleave", 1)) for one in rows} == {
        ("22,21,21,16", False, 4, 1)
    }
    (uneven, even) = (sizes(**split, implementation=given)[0]["rows"][0] for given in (("stages=35,15,15,15",), ()))
    assert uneven["step_s"] > even["step_s"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"implementation": ("stages",)}, "implementation must be FIELD=VALUE, for a field without an option, got "
            "'stages'; separate the field and its value by '='",
        ),
        ({"implementation": ("compiled=1",)}, "got 'compiled=1'; use --compile$"),
        ({"implementation": ("stags=4,4",)}, "implementation: unknown key 'stags'; did you mean 'stages'"),
        ({"implementation": ("graphs=all",)}, "graphs: invalid enum value 'all'; known: none, routers, blocks, steps"),
        ({"implementation": ("stages=16,16",)}, "stages need a pipeline, got '16,16' without one; add --pp"),
        ({"implementation": ("stages=16,17",), "pp": "2", "microbatches": 2, "strategies": "fsdp2"},
         "stages must give 32 layers to 2 stages"),
        ({"model": "llama3-8bb"}, "no preset 'llama3-8bb'; did you mean 'llama3-8b'"),
        ({"cluster": "dgx-h10x4"}, "no profile and no file 'dgx-h10x4'; did you mean 'dgx-h100x4'"),
        ({"strategies": "ddp,refshard-yafspd"}, "no strategy 'refshard-yafspd' has a closed form; did you mean '"),
        (
            {"strategies": "ddp,yafsdp"}, "strategy: 'yafsdp' is upstream's package, which has no closed form; plan "
            "the engine's mode refshard-yafsdp, or, where the package is installed, dry-run it: refshard dryrun "
            "--cluster dgx-h100x2 --model llama3-8b --strategy yafsdp$",
        ),
        ({"strategies": "hf-trainer"}, "'hf-trainer' has no closed form; dry-run it: refshard dryrun --cluster dgx-h"),
        ({"strategies": "fsdp2-compiled"}, "no closed form of its own; plan fsdp2 with --compile yes$"),
        ({"strategies": "simplefsdp-bucket"}, "cannot be dry-run; measure it on GPUs: refshard run --strategy"),
        ({"strategies": " , "}, "strategy: no name in ' , '; separate names by commas, or leave the option out"),
        ({"seq_len": 0}, "--seq-len must be >= 1, got 0; give a number"),
        ({"microbatches": 0}, "microbatches must be >= 1, got 0"),
        ({"top": 0}, "top must be >= 1, got 0"),
        ({"microbatch": "-1"}, "microbatch must be numbers from 1, separated by commas, got '-1'; write 1,2,4"),
        ({"tp": "two"}, "tp must be numbers from 1, separated by commas, got 'two'; write 1,2,4 or, doubling, 8..64"),
        ({"pp": ""}, "pp must be numbers from 1, separated by commas, got ''; write"),
        ({"gpus": "0"}, "gpus must be numbers from 1, separated by commas, got '0'; write 1,2,4 or, doubling, 8..64"),
        ({"gpus": "1-4"}, "gpus must be numbers from 1, separated by commas, got '1-4'; write"),
        ({"nodes": 0}, "--nodes must be >= 1, got 0"),
        ({"nodes": 2, "gpus": "8"}, "plan: --nodes and --gpus exclude each other, got both; leave one out"),
        ({"gpus": "8..2"}, r"gpus must ascend, got '8\.\.2'; write, for example, 64\.\.2048"),
        ({"gpus": "0..4"}, r"gpus must be numbers from 1, separated by commas, got '0\.\.4'; write"),
        ({"tokens_per_step": 5000}, "must be a multiple of seq-len = 4,096, got 5,000; change either"),
        ({"tokens_per_step": 1}, "must be a multiple of seq-len = 4,096, got 1; change either"),
        ({"price_usd": -1.0}, r"--usd-per-gpu-hour must be >= 0, and finite, got -1\.0; give"),
        ({"price_usd": float("nan")}, "--usd-per-gpu-hour must be >= 0, and finite, got nan; give"),
        ({"mtbf_hours": 0.0}, r"--mtbf must be > 0 hours, and finite, got 0\.0; give"),
        ({"precision": "fp16"}, "precision must be fp32, bf16, fp8, mxfp8 or nvfp4, got 'fp16'; choose one of them"),
        ({"frozen": "tail"}, "frozen must be some of embedding, head and one first-N, with commas between, got 'tail'"),
        ({"frozen": "head", "strategies": "fsdp1"}, "frozen: frozen parts have no closed form in 'fsdp1'; plan one"),
        ({"precision": "bf16,fp8", "cluster": "dgx-a100"}, "the hardware profile has rates for .*, got fp8; choose"),
        ({"precision": " , "}, "precision: no word in ' , '; separate words by commas, or leave the option out"),
        ({"compiled": "on"}, "compile must be yes, no or both, got 'on'; choose one of them"),
        ({"reduction": "int8"}, "reduction must be fp32 or bf16, got 'int8'; choose one of them"),
        ({"schedule": "gpipe"}, "schedule must be 1f1b, interleaved or zero-bubble, got 'gpipe'; choose one of"),
        ({"checkpointing": "some"}, "checkpointing must be auto, none, selective, full, every-K .*'some'; choose one"),
        (
            {"checkpointing": "every-0"},
            "checkpointing must be auto, none, selective, full, every-K or .*, got 'every-0'",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        plan(options(**changes))
    assert "\n" not in str(refused.value)


def test_a_tool_that_does_not_exist_is_refused_before_the_search() -> None:
    with pytest.raises(SpecError, match="emit: no tool 'megatrom'; did you mean 'megatron'"):
        plan(options(), tool="megatrom")


def test_notes_say_what_offload_leaves_out() -> None:
    assert any("With --offload the host runs AdamW" in sentence for sentence in notes(plan(options(offload=True))))
    assert not any("With --offload" in sentence for sentence in notes(plan(options())))
