"""What all commands have in common: forms, quiet and verbose, streams, exit statuses, and names to complete."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
import typer
from typer.testing import CliRunner

from refshard import resources
from refshard.cli import app, main
from refshard.commands.printing import LOG, OUTPUT_OPTIONS, paper, printed, put_out, tell, warn
from refshard.commands.progress import Lines, Nothing, observer
from refshard.errors import SpecError
from refshard.report.blocks import Answer, Notes, Text, Verdict
from refshard.report.forms import SCHEMA_VERSION, Paper
from tests.report.runs import run, write

pytestmark = pytest.mark.slow

ENGINE = resources.root() / "profiles" / "recorded" / "xeon-2-cores" / "engine_network"


def made(status: int = 0) -> Answer:
    return Answer(
        data={"n": 1},
        rows=[{"n": 1}],
        blocks=[Text(text="all"), Notes(sentences=["a detail"], where="detail"), Verdict(sentences=["The verdict."])],
        status=status,
    )


def command(status: int = 0) -> Callable[..., Any]:
    """A command of one option, as others are made."""
    small = typer.Typer()

    @small.command()
    @printed
    def measure_(out: Annotated[Path | None, typer.Option()] = None) -> Answer:
        tell("progress")
        LOG.debug("a detail of the progress")
        warn("a warning")
        if out is not None and str(out) == "-":
            print("the file")
        return made(status)

    return lambda *words: CliRunner().invoke(small, list(words))


class TestOptions:
    """Which form is printed, and where."""

    def test_each_form_is_printed_to_standard_output(self) -> None:
        measure = command()
        assert measure().stdout == "all\n\nThe verdict.\n"
        assert measure("-v").stdout == measure("--verbose").stdout == "all\n\n* a detail\n\nThe verdict.\n"
        assert measure("-q").stdout == measure("--quiet").stdout == "The verdict.\n"
        assert json.loads(measure("--json").stdout) == {"schema_version": SCHEMA_VERSION, "command": "measure", "n": 1}
        assert measure("--csv").stdout_bytes == f"n,schema_version\r\n1,{SCHEMA_VERSION}\r\n".encode()
        assert measure("--markdown").stdout.startswith("## refshard measure\n\n- **The verdict.**\n\nall\n")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--json", "--csv"], "--json and --csv: only one format can be printed; leave out one of them"),
            (["--markdown", "--csv"], "--csv and --markdown: only one format can be printed"),
            (["-q", "-v"], "--verbose and --quiet exclude each other; leave out one of them"),
        ],
    )
    def test_what_excludes_each_other_is_refused_before_anything_is_done(self, words: list[str], message: str) -> None:
        done = command()(*words)
        assert isinstance(done.exception, SpecError)
        assert str(done.exception).startswith(message)
        assert done.output == ""

    def test_progress_and_warnings_go_to_standard_error_and_quiet_silences_progress(self) -> None:
        assert command()().stderr == "progress\na warning\n"
        assert command()("-q").stderr == "a warning\n"
        assert command()("--quiet", "--json").stderr == "a warning\n"

    def test_the_level_of_the_log_follows(self) -> None:
        for word, level in (("-q", logging.WARNING), ("-v", logging.DEBUG), ("--json", logging.INFO)):
            command()(word)
            assert LOG.level == level
        command()("-q")
        assert isinstance(observer(), Nothing)
        command()()
        assert isinstance(observer(), Lines)

    @pytest.mark.parametrize("status", [0, 1, 4])
    def test_the_status_of_the_answer_is_that_of_the_command(self, status: int) -> None:
        for words in ([], ["--json"], ["-q"]):
            done = command(status)(*words)
            assert done.exit_code == status
            assert "erdict" in done.stdout or done.stdout.startswith("{")

    def test_a_file_that_goes_to_standard_output_has_it_for_itself(self) -> None:
        done = command()("--out", "-")
        assert done.stdout == "the file\n"
        assert done.stderr.endswith("all\n\nThe verdict.\n")
        assert command()("--out", "-", "--json").stderr.endswith("}\n")


class Terminal(StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


class TestPaper:
    """A terminal's width and colours; a file has neither."""

    def test_a_file_has_any_width_and_no_colours(self) -> None:
        assert paper(StringIO()) == Paper(width=None, colours=False)

    @pytest.mark.parametrize(
        ("environment", "colours"),
        [
            ({}, True),
            ({"NO_COLOR": "1"}, False),
            ({"NO_COLOR": ""}, True),  # as https://no-color.org has it
            ({"TERM": "dumb"}, False),
        ],
    )
    def test_a_terminal_has_colours_unless_it_is_dumb_or_they_are_not_wanted(
        self, environment: dict[str, str], colours: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm", "COLUMNS": "72", **environment}.items():
            monkeypatch.setenv(name, value)
        assert paper(Terminal()) == Paper(width=72, colours=colours)


class TestPipes:
    """A reader that has seen enough is no error."""

    def test_what_nobody_reads_is_no_error(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            put_out("text\n" * 100_000, stream)

    @pytest.mark.processes
    @pytest.mark.parametrize("words", ["list models", f"show {ENGINE} --json"])
    def test_head_ends_a_command_quietly(self, words: str) -> None:
        script = f"set -o pipefail; {sys.executable} -m refshard {words} | head -1"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=resources.root())
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("\n") == 1

    @pytest.mark.processes
    def test_a_reader_that_is_gone_before_anything_is_written_is_none_either(self) -> None:
        script = f"set -o pipefail; {sys.executable} -m refshard list models | true"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=resources.root())
        assert (done.returncode, done.stderr) == (0, "")


GROUP = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands  # type: ignore[attr-defined]
PLAIN = {"report", "accept"}
"""They print a path."""


class TestEveryCommand:
    """One set of options, whatever is asked."""

    @pytest.mark.parametrize("name", sorted(COMMANDS.keys() - PLAIN))
    def test_each_that_prints_a_table_takes_the_forms(self, name: str) -> None:
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert options >= {*OUTPUT_OPTIONS, "-v", "-q"}
        assert {"--json", "--csv", "--markdown", "--verbose", "--quiet"} == OUTPUT_OPTIONS

    @pytest.mark.parametrize("name", sorted(COMMANDS))
    def test_each_explains_itself_at_h(self, name: str) -> None:
        short, long = (CliRunner().invoke(app, [name, option]) for option in ("-h", "--help"))
        assert short.exit_code == 0
        assert short.stdout == long.stdout
        assert "Usage" in short.stdout

    @pytest.mark.parametrize(
        "words",
        [
            ["show", "RUN"],
            ["show", "RUNS"],
            ["compare", "ddp", "fsdp2", "--run", "RUN"],
            ["compare", "RUN", "RUN"],
            ["run", "gate", "--list"],
            ["run", "--strategy", "ddp", "--list"],
            ["trace", str(ENGINE)],
            ["plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--strategy", "ddp,refshard-fsdp"],
            ["history", "RUNS"],
            pytest.param(["gate", "--baselines", "RUNS"], marks=pytest.mark.processes),
            *(["list", kind] for kind in ("strategies", "models", "modes", "suites", "clusters", "hardware")),
        ],
        ids=lambda words: "-".join(words[:2]).replace("/", "_")[-40:],
    )
    def test_each_prints_every_form(self, words: list[str], tmp_path: Path) -> None:
        folder = write(run(), tmp_path / "runs" / "made")
        given = [{"RUN": str(folder), "RUNS": str(folder.parent)}.get(word, word) for word in words]
        done = {option: CliRunner().invoke(app, [*given, option]) for option in ("--json", "--csv", "--markdown", "-q")}
        assert len({one.exit_code for one in done.values()}) == 1
        found = json.loads(done["--json"].stdout)
        assert (found["schema_version"], found["command"]) == (SCHEMA_VERSION, words[0])
        header, *rows = done["--csv"].stdout.splitlines()
        assert header.endswith("schema_version")
        assert rows or words[0] == "gate"
        assert done["--markdown"].stdout.startswith(f"## refshard {words[0]}\n")
        assert not any("\x1b" in one.stdout for one in done.values())


class TestMistakes:
    """One line on standard error, and status 2."""

    @pytest.mark.parametrize("words", [["show", "none"], ["list", "model"], ["show", "--json", "--csv"]])
    def test_a_mistake_is_one_line(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert err.startswith("refshard: ")
        assert err.count("\n") == 1


class TestCompletion:
    """Names that a shell completes, the last of several between commas too."""

    @staticmethod
    def complete(name: str, option: str, incomplete: str) -> list[str]:
        (parameter,) = (p for p in COMMANDS[name].params if option in (p.name, *p.opts))
        context = click.Context(COMMANDS[name])
        return [item.value for item in parameter.shell_complete(context, incomplete)]

    def test_suites_models_and_clusters_are_completed_by_their_beginnings(self) -> None:
        assert self.complete("run", "suite", "quick") == ["quickstart"]
        assert self.complete("plan", "--cluster", "dgx-h10") == ["dgx-h100"]
        assert set(self.complete("plan", "--model", "")) == set(resources.model_profiles())
        assert self.complete("list", "what", "mo") == ["models", "modes"]

    def test_after_a_comma_the_last_of_several_is_completed(self) -> None:
        found = self.complete("run", "--strategy", "ddp,refshard-ya")
        assert sorted(found) == [f"ddp,refshard-yafsdp{kind}" for kind in ("", "-compiled", "-compiled-model", "-kept")]
        assert self.complete("run", "--model", "llama-tiny,llama-mi") == ["llama-tiny,llama-mini"]
        assert self.complete("run", "--strategy", "no-such") == []

    @pytest.mark.processes
    def test_a_shell_gets_them(self) -> None:
        environment = {
            **os.environ, "_REFSHARD_COMPLETE": "complete_bash", "COMP_WORDS": "refshard run quick", "COMP_CWORD": "2",
        }  # fmt: skip
        script = "import sys; sys.argv = ['refshard']; from refshard.cli import app; app(prog_name='refshard')"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.stdout.split() == ["quickstart"], done.stderr
