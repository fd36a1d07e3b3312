"""``refshard dryrun --sweep``, ``--largest`` and ``--advise``, on a script whose memory is known."""

import json
from pathlib import Path
from typing import Any

import pytest

from refshard.cli import main
from refshard.commands.dryrun import Options, choices
from refshard.commands.dryrun_model import Training
from refshard.commands.sweep import TRIALS
from refshard.dryrun.trials import read_trials
from tests.dryrun import scripts
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]
GIB = 2**30


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(scripts.BATCHED)
    return "train.py"


def dryrun(*words: str, gpus: str = "1") -> object:
    """The exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["dryrun", "--cluster", "dgx-h100", "--gpus", gpus, *words])
    return ended.value.code or 0


def printed(capfd: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    """The JSON object, and the lines of progress."""
    out, err = capfd.readouterr()
    return json.loads(out), [line for line in err.splitlines() if line.startswith("[")]


def test_all_combinations_are_run_and_the_best_that_fits_is_named(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--sweep", "--batch {4,9} {,--checkpoint}", "--json", "--", script, "{}")
    assert dryrun(*options) == 0
    found, progress = printed(capfd)
    rows = {tuple(row["choices"].values()): row for row in found["rows"]}
    assert {key: row["fits"] for key, row in rows.items()} == {
        ("4", "no"): True, ("4", "yes"): True, ("9", "no"): False, ("9", "yes"): True,
    }  # fmt: skip
    assert rows["9", "no"]["reserved_bytes"] // GIB == 81
    assert [line[:5] for line in progress] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "[4/4] --batch 9" in progress[-1] or "[4/4] --batch 4" in progress[-1]
    (folder,) = Path("runs").iterdir()
    saved = (folder / TRIALS).read_bytes().splitlines(keepends=True)
    assert len(saved) == 4

    # Interrupted in the middle of a line: two are run again.
    (folder / TRIALS).write_bytes(b"".join(saved[:2]) + saved[2][:50])
    assert dryrun("--resume", str(folder), *options) == 0
    again, progress = printed(capfd)
    assert [line[:5] for line in progress] == ["[3/4]", "[4/4]"]
    assert [row["reserved_bytes"] for row in again["rows"]] == [row["reserved_bytes"] for row in found["rows"]]
    assert len(read_trials(folder / TRIALS)) == 4


def test_the_largest_batch_is_found_for_each_choice(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dryrun("--largest", "--batch {}", "--sweep", "{,--checkpoint}", "--quiet", "--", script, "{}") == 0
    said = capfd.readouterr().out
    assert "LARGEST --batch with no --checkpoint: 8 (72" in said
    assert "LARGEST --batch with --checkpoint: 19 (76" in said


def test_what_does_not_fit_says_what_does(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dryrun("--", script, "--batch", "16") == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "--batch 8: fits, 72.1 GiB of 78.4 GiB" in said
    assert said.endswith("Fits with --batch 8 (dry-run)")


def test_no_advice_where_it_is_not_wanted(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dryrun("--no-advise", "--", script, "--batch", "16") == 1
    assert "What would fit" not in capfd.readouterr().out


def test_more_gpus_are_tried_where_the_script_has_ranks(
    tmp_path: Path, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shared = scripts.BATCHED.replace("options.batch * (", "64 // torch.distributed.get_world_size() * (")
    joined = 'import torch\ntorch.distributed.init_process_group("nccl")\n'
    (tmp_path / script).write_text(shared.replace("import torch\n", joined, 1))
    assert dryrun("--", script, gpus="2") == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "Fits with --gpus 8 (dry-run)" in said
    assert "--gpus 8: fits, 72.1 GiB of 78.4 GiB" in said


def test_what_can_be_varied_of_a_script_and_of_a_model(script: str) -> None:
    of_script = choices(Options(words=(script, "--batch-size", "16"), cluster="dgx-h100", gpus=2, tokens_per_step=8))
    assert of_script.on_gpus(4).request.world_size == 4
    assert of_script.on_gpus(4).global_tokens is None  # those that were given are of two GPUs
    assert of_script.with_batch is not None
    assert of_script.with_batch(3).request.command == (script, "--batch-size", "3")
    training = Training(model="llama-tiny", seq_len=64, microbatch=2)
    of_model = choices(Options(training=training, cluster="dgx-h100", gpus=2))
    assert "gpus=4" in of_model.on_gpus(4).request.command
    assert of_model.on_gpus(4).global_tokens == 4 * 2 * 64
    assert of_model.with_batch is not None
    assert "global_batch=6" in of_model.with_batch(3).request.command
    (full,) = of_model.others.values()
    assert "checkpointing=full" in full.request.command


REFUSED = [
    (("--sweep", "--batch {1,2}", "--", "train.py"), "must say once, with {}, where the options go"),
    (("--sweep", "--batch 2", "--", "train.py", "{}"), "--sweep must have choices in braces"),
    (("--largest", "--batch {1,2}", "--", "train.py", "{}"), "--largest must leave one number open"),
    (
        ("--sweep", "--batch {1,2}", "--trace", "t.json", "--", "train.py", "{}"),
        "--trace, --against and --explain-oom are for a single dry run",
    ),
    (("--sweep", "--batch {1,2}", "--ranks", "all", "--", "train.py", "{}"), "--ranks, --races, --advise and"),
    (("--jobs", "0", "--", "train.py"), "--jobs must be a number >= 1"),
    (("--resume", "runs/x", "--", "train.py"), "--resume needs the --sweep or the --largest"),
    (("--resume", "runs/x", "--sweep", "--batch {1,2}", "--", "train.py", "{}"), "runs/x is not the folder of a sweep"),
    (("--model", "llama3-8b", "--sweep", "--batch {1,2}"), "with --model, --model, --strategy,"),
    (("--model", "llama3-8b", "--sweep", "--microbatch {one,two}"), "--microbatch must be a number >= 1, with"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_wrong_commands_are_refused_in_one_sentence(
    script: str, words: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dryrun(*words) == 2
    assert says in " ".join(capfd.readouterr().err.split())
    assert not Path("runs").exists()
