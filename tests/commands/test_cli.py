"""The command line as a whole: exit statuses, help, and what is said of a mistake."""

import errno
import io
import re
import time
from pathlib import Path

import pytest
import typer

from refshard.cli import FASTEST, FIT, MACHINES, SLOW, SLOWER, app, main
from refshard.commands.printing import elapsed, paper
from refshard.errors import STATUSES, LaunchError, SpecError, Status
from refshard.report.blocks import Answer, Text
from tests.commands.conftest import Command

RECORDED = Path(__file__).parents[2] / "profiles" / "recorded" / "dryrun"
RUN = next(iter(sorted(path.parent for path in RECORDED.glob("*/records.jsonl"))))
NAMES = [command.name or command.callback.__name__.strip("_").replace("_", "-") for command in app.registered_commands]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("plan --model llama3-8b --cluster 8xh100 --strategy fsdp2", Status.YES),
        ("plan --model llama3-70b --cluster 8xh100 --strategy fsdp2", Status.NO),
        ("plan --model llama3-8b --cluster 8xh1000000", Status.WRONG_CALL),
        ("fit llama3-70b 8xh100 --strategy fsdp2", Status.NO),
        ("fit llama3-8b", Status.WRONG_CALL),
        ("dryrun --cluster 8xh100 none.py", Status.WRONG_CALL),
        ("run --strategy ddp --list", Status.YES),
        ("run none", Status.WRONG_CALL),
        (f"show {RUN}", Status.YES),
        ("show none", Status.WRONG_CALL),
        ("compare none/a none/b", Status.WRONG_CALL),
        (f"report {RUN} --out page.html", Status.YES),
        ("report none", Status.WRONG_CALL),
        ("trace none.json", Status.WRONG_CALL),
        ("gate --baselines . -- train.py", Status.WRONG_CALL),
        ("gate --suite none", Status.WRONG_CALL),
        ("accept none --reason new", Status.WRONG_CALL),
        ("noise --from none", Status.WRONG_CALL),
        ("history none", Status.WRONG_CALL),
        ("upgrade-check none/a none/b -- train.py", Status.WRONG_CALL),
        ("calibrate --network 2", Status.WRONG_CALL),
        ("validate none", Status.WRONG_CALL),
        ("list models", Status.YES),
        ("list none", Status.WRONG_CALL),
        ("none", Status.WRONG_CALL),
        ("", Status.WRONG_CALL),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_exit_statuses(
    refshard: Command, words: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = refshard(*words.split())
    assert ended.returncode == status
    if status == Status.WRONG_CALL and words:
        assert re.fullmatch(r"refshard: .+\n", ended.stderr), "a mistake is one line"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SpecError("no"), Status.WRONG_CALL),
        (LaunchError("no"), Status.NO_VERDICT),
        (KeyError("defect"), 3),
        (OSError(errno.ENOSPC, "No space left on device"), Status.NO_VERDICT),
    ],
)
def test_a_defect_is_no_verdict(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    program = typer.Typer()

    @program.command()
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        main([], program)
    assert ended.value.code == status
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, KeyError)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dryrun --clustr h100 train.py", "dryrun: no option --clustr; did you mean --cluster? (options of a script"),
        ("dryrun --cluster h100 --lr 1 -- train.py", "dryrun: no option --lr; "),
        ("dryrun train.py --cluster h100", "dryrun: missing option '--cluster'"),
        ("gate --baselin main", "gate: no option --baselin; did you mean --baseline?"),
        ("upgrade-check a b --gpu 8 -- train.py", "upgrade-check: no option --gpu; did you mean --gpus?"),
        ("plan --model llama3-8b --cluster 8xh10", "did you mean '8xh100'?"),
        ("plan --model llama3-8 --cluster 8xh100", "did you mean 'llama3-8b'?"),
        (
            "plan --model llama3-8b --cluster 8xh100 --seq-len 8kb",
            "plan: --seq-len must be a number >= 1, with k for 2^10",
        ),
        ("plan --model llama3-8b --cluster 8xh100 --gpus 8..2", "gpus must ascend, got '8..2'"),
        ("dryrn", "no such command 'dryrn'. Did you mean 'dryrun'?"),
        ("help", "no such command 'help'; see refshard --help"),
        ("fit llama3-8b 8h100", "did you mean '8xh100'?"),
        ("fit llama3-8b 8 h100", "unexpected extra argument(s) (h100); see refshard fit --help"),
        ("plan --model llama3-8b --cluster 8xh100 --strategy FSDP2", "did you mean 'fsdp2'?"),
        ("plan --model llama3-8b --cluster 8xh100 --top many", "plan: --top must be a number >= 1"),
        ("plan --model llama3-8b --cluster 8xh100 --mtbf never", "plan: --mtbf must be a number, got 'never'"),
        ("plan --model llama3-8b --cluster 8xh100 --lora-rank 16", "lora_rank needs tuning 'lora' or 'qlora', got 16"),
        ("plan --model llama3-8b --cluster 8xh100 --out x", "out: 'x' is for the files of --emit"),
        ("dryrun --cluster 8xh100 --gpus= -- train.py", "gpus: '' given; name a value"),
        ("dryrun --cluster 8xh100 --trace /proc/t.json -- train.py", "trace: /proc/t.json cannot be written"),
        ("dryrun --cluster 8xh100 -- refshard/cli.p", "no script 'refshard/cli.p'; did you mean 'refshard/cli.py'?"),
        ("gate -- none.py", "there is no script 'none.py'"),
        (f"report {RUN} --out page.pdf", "out: must be a .html file, a folder or a .zip, got 'page.pdf'"),
    ],
)
def test_a_mistake_names_the_nearest(refshard: Command, words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    ended = refshard(*words.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr


def test_what_follows_a_script_is_its_own(refshard: Command) -> None:
    ended = refshard("dryrun", "--cluster", "8xh100", "none.py", "--cluster", "none", "--lr", "1")
    assert "there is no script 'none.py'" in ended.stderr


def test_help_shows_options_in_panels_by_purpose(refshard: Command) -> None:
    shown = refshard("dryrun", "--help").stdout.split("Arguments", 1)[1]
    first = ("--cluster", "Without a script: --model", "--strategy", "What to find out", "--races", "Several dry runs",
             "--sweep", "Output", "--trace", "--html", "--json", "--quiet")  # fmt: skip
    places = [shown.index(word) for word in first]
    assert places == sorted(places)


def test_help_groups_commands_by_question_and_shows_exit_statuses(refshard: Command) -> None:
    shown = refshard("--help").stdout
    places = [shown.index(question) for question in (FIT, FASTEST, SLOW, SLOWER, MACHINES)]
    assert places == sorted(places)
    assert all(f"{status:>3}  {meaning.split(':')[0]}:" in shown for status, meaning in STATUSES.items())


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_an_example(refshard: Command, name: str) -> None:
    assert f"Example: refshard {name} " in f"{' '.join(refshard(name, '--help').stdout.split())} "


def test_columns_are_honoured_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert paper(io.StringIO()).width == 60
    monkeypatch.setenv("COLUMNS", "")
    assert paper(io.StringIO()).width is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "some"), [(_Terminal(), True), (io.StringIO(), False)])
def test_elapsed_time_is_shown_on_a_terminal_only(stream: io.StringIO, some: bool) -> None:
    with elapsed(lambda: "dry run", stream, every_s=0.01):
        for _ in range(200):
            if "\n" in stream.getvalue() or not some:
                break
            time.sleep(0.01)
    assert stream.getvalue().startswith("dry run: 0 s\n") == some


def test_every_answer_has_a_status_of_the_table() -> None:
    assert Answer(data={}, rows=(), blocks=[Text(text="")]).status == Status.YES
    assert set(STATUSES) == set(Status)
