"""How environments to compare are named, and what is refused."""

import sys
from pathlib import Path

import pytest

from refshard.dryrun import environments
from refshard.dryrun.environments import CURRENT, Environment, find_environment, program_in
from refshard.errors import RefshardError, SpecError

pytestmark = pytest.mark.processes


def fake_python(folder: Path, does: str) -> Path:
    """An environment with a Python that does this."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    return folder


def says(packages: str, wrong: str = "") -> str:
    return f"""echo '{{"packages": {packages}, "wrong": "{wrong}"}}'"""


def test_a_folder_and_its_python_name_the_same_environment(tmp_path: Path) -> None:
    folder = fake_python(tmp_path / "venv", says('{"torch": "2.13.0"}'))
    found = find_environment(str(folder))
    assert (found.python, found.packages) == (str(folder / "bin" / "python"), {"torch": "2.13.0"})
    assert find_environment(found.python).python == found.python


def test_the_current_environment_is_this_python() -> None:
    found = find_environment(CURRENT)
    assert found.python == sys.executable
    assert {"msgspec", "torch", "typing-extensions"} <= found.packages.keys()


def test_another_python_imports_this_very_refshard(tmp_path: Path) -> None:
    folder = fake_python(tmp_path / "venv", 'test "$(readlink -f ${PYTHONPATH%%:*}/refshard)" = ' + str(
        Path(environments.__file__).parents[1].resolve()) + " && " + says('{"torch": "2.13.0"}'))  # fmt: skip
    assert find_environment(str(folder)).packages == {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (says('{"torch": "2.9.1"}'), "torch must be 2.11 or newer, got 2.9.1"),
        (says('{"torch": "2.12.0"}', "the fake CUDA device needs a CPU build"), "needs a CPU build"),
        ("echo \"ModuleNotFoundError: No module named 'msgspec'\" >&2; exit 1", "No module named 'msgspec'); install"),
    ],
)
def test_environments_that_cannot_run_dry_runs_are_refused(tmp_path: Path, does: str, said: str) -> None:
    folder = fake_python(tmp_path / "venv", does)
    with pytest.raises(RefshardError) as refused:
        find_environment(str(folder))
    assert str(refused.value).startswith(f"{folder}: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("./no-such-venv", "there is no environment './no-such-venv'"),
        ("'a b", "requirements must be words for pip"),
        ("", "got none"),
    ],
)
def test_wrong_environments_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        find_environment(text)


def test_only_an_environment_that_was_made_gets_a_copy_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own environments stay as they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "accelerate").write_text("#!/usr/bin/python\n")
    own = fake_python(tmp_path / "venv", says("{}"))
    made = fake_python(tmp_path / "cache" / "refshard" / "environments" / "x" / "venv", says("{}"))
    mine, theirs = (
        Environment(name=folder.name, python=str(folder / "bin" / "python"), packages={}) for folder in (own, made)
    )
    with pytest.raises(SpecError, match=r"there is no .*accelerate; install it there"):
        program_in(mine, str(tmp_path / "accelerate"))
    assert Path(program_in(theirs, str(tmp_path / "accelerate"))).read_text() == "#!/usr/bin/python\n"
