"""``refshard plan`` and ``refshard validate`` as a user meets them."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.plan import Asked, plan
from refshard.commands.validate import validate
from refshard.errors import SpecError
from refshard.plan.recipe import RECIPES
from refshard.tracing.kineto import read_timeline
from refshard.tracing.overlap import step_breakdowns
from tests.report.printed import as_csv, as_json, notes, tables, verdict


def asked(**changes: Any) -> Asked:
    fields: dict[str, Any] = {
        "model": "llama3-8b", "cluster": "dgx-h100x2", "seq_len": 4096, "microbatch": 1, "accumulate": 1,
        "strategies": "refshard-yafsdp,ddp", "checkpoint": "auto", "checkpoint_layers": None, "replicas": 1,
        "dtype": None, "reduction": "fp32", "compiled": False, "price_usd": 2.5,
    }  # fmt: skip
    return Asked(**{**fields, **changes})


@pytest.mark.processes
def test_every_strategy_of_405b_on_16384_gpus_takes_seconds_and_no_torch() -> None:
    """The command that the README shows, in a process of its own; the goals are 5 s and 1 GiB."""
    script = (
        "import sys\nsys.argv = "
        "['refshard', 'plan', '--model', 'llama3.1-405b', '--cluster', 'dgx-h100x2048', '--json']\n"
        "from refshard.cli import app\n"
        "app(standalone_mode=False)\n"
        "print('torch' in sys.modules or 'pandas' in sys.modules, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    told = json.loads(done.stdout)
    assert done.stderr.strip() == "False"
    assert told["world_size"] == 16384
    assert {row["strategy"] for row in told["strategies"]} == RECIPES.keys()
    assert [row for row in told["strategies"] if row["fits"]]
    assert spent < 60, "a bound that only a mistake in the order of growth would break"


def test_a_model_may_be_a_file_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text((Path(__file__).parents[2] / "profiles/models/llama3-8b.toml").read_text())
    own, preset = (
        as_json(plan(asked(model=model, strategies="refshard-fsdp"), traces=tmp_path / "traces"))
        for model in (str(mine), "llama3-8b")
    )
    assert own["strategies"] == preset["strategies"]
    traces = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert traces == ["refshard-fsdp-llama3-8b.json", "refshard-fsdp-mine.json"]
    with pytest.raises(SpecError, match=r"none\.toml: cannot be read"):
        plan(asked(model=str(tmp_path / "none.toml")))


def test_each_strategy_comes_once_and_one_without_a_closed_form_is_told() -> None:
    """Upstream's YaFSDP is other code than the engine's mode, whose plan is not its."""
    told = as_json(plan(asked(strategies="refshard-yafsdp, yafsdp,ddp,ddp")))
    assert sorted(row["strategy"] for row in told["strategies"]) == ["ddp", "refshard-yafsdp"]
    assert told["unplanned"] == ["yafsdp"]
    assert told["warnings"][0].startswith(
        "Not planned: 'yafsdp' cannot be planned or simulated (no closed form); dry-run"
    )


def test_layers_to_checkpoint_by_number_by_word_or_as_few_as_fit() -> None:
    def layers(**changes: Any) -> int:
        told = as_json(plan(asked(strategies="refshard-yafsdp", **changes)))
        return int(told["strategies"][0]["checkpointed_layers"])

    assert layers(checkpoint_layers=10) == 10
    assert layers(checkpoint="none") == 0
    assert layers(checkpoint="every-2") == 16
    assert layers(checkpoint="selective") == 32
    assert layers() == 0


def test_a_trace_of_each_step_can_be_read_like_any_other(tmp_path: Path) -> None:
    told = as_json(plan(asked(), traces=tmp_path / "traces"))
    traces = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert traces == ["ddp-llama3-8b.json", "refshard-yafsdp-llama3-8b.json"]
    for row in told["strategies"]:
        (step,) = step_breakdowns(read_timeline(tmp_path / "traces" / f"{row['strategy']}-llama3-8b.json"))
        assert step.span_ns == pytest.approx(row["step_time_s"] * 1e9, abs=1)


def test_a_page_can_be_written_and_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    plan(asked(), page=tmp_path / "plan.html")
    assert "llama3-8b on dgx-h100x2" in (tmp_path / "plan.html").read_text()
    with pytest.raises(
        SpecError, match=r"cannot be written \(No such file or directory\); name a file in a folder that"
    ):
        plan(asked(), page=tmp_path / "none" / "plan.html")


def test_the_status_says_whether_anything_fits() -> None:
    assert plan(asked()).status == 0
    nothing = plan(asked(model="llama3.1-405b"))
    assert nothing.status == 1
    assert verdict(nothing)[0].startswith("Nothing fits (")
    done = CliRunner().invoke(app, ["plan", "--model", "llama3.1-405b", "--cluster", "dgx-h100", "--strategy", "ddp"])
    assert done.exit_code == 1
    assert "Nothing fits" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama3-8bb"}, "no preset 'llama3-8bb'; did you mean 'llama3-8b'"),
        ({"cluster": "dgx-h10x4"}, "no profile and no file 'dgx-h10'; did you mean 'dgx-h100'"),
        ({"strategies": "ddp,refshard-yafspd"}, "no strategy 'refshard-yafspd'; did you mean 'refshard-yafsdp'"),
        (
            {"strategies": "yafsdp"},
            "'yafsdp' cannot be planned or simulated \\(no closed form\\); dry-run it: `refshard dryrun`",
        ),
        ({"strategies": " , "}, "no name in ' , '"),
        ({"seq_len": 0}, "seq_len must be >= 1, got 0"),
        ({"microbatch": -1}, "microbatch must be >= 1, got -1"),
        ({"price_usd": -1.0}, "price must be >= 0 USD per GPU-hour, and finite, got -1.0"),
        ({"replicas": 3}, "replicas must divide the 16 ranks of the cluster, got 3"),
        ({"dtype": "fp8"}, "dtype must be fp32 or bf16, got 'fp8'"),
        ({"reduction": "int8"}, "reduction must be fp32 or bf16, got 'int8'"),
        ({"checkpoint_layers": 33}, "must be from 0 to the model's 32 layers, got 33"),
        ({"checkpoint_layers": 3, "checkpoint": "full"}, "both name layers, got 3 and 'full'; give one"),
        ({"checkpoint": "some"}, "checkpoint must be auto, none, full, selective or every-K, got 'some'"),
    ],
)
def test_mistakes_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        plan(asked(**changes))
    assert "\n" not in str(refused.value)


def test_validate_prints_published_tables_and_json_says_the_same() -> None:
    found = validate(None)
    told = as_json(found)["tables"]
    assert [table["table"] for table in told] == ["torchtitan", "yafsdp"]
    for table, shown in zip(told, tables(found)):
        assert shown.title.startswith(table["title"])
        assert any(note.startswith(f"Median error {100 * table['median_error']:.1f} %") for note in notes(found))
        assert len(shown.rows) == len(table["rows"])
    assert len(as_csv(found)) == sum(len(table["rows"]) for table in told)


def test_validate_of_a_run_without_predictions_says_what_to_do() -> None:
    from refshard import resources

    folder = resources.root() / "profiles" / "recorded" / "epyc-2-cores" / "engine"
    with pytest.raises(SpecError, match="holds no case that was both measured and predicted; run a suite"):
        validate(folder)
