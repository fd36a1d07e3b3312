"""The table of clients, without running any."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.clients.run import (
    HERE,
    SCRIPTS,
    Ended,
    check_out,
    command_of,
    load_clients,
    published,
    row,
    run_all,
    variables_of,
)
from validation.schema import scripted_runs

CLIENTS = load_clients()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_all_that_a_client_names_is_there(client) -> None:  # type: ignore[no-untyped-def]
    pins = (HERE / f"{client.pins}.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
    if client.checkout:
        assert len(client.commit) == 40
    else:
        assert any(pin.startswith(f"{client.package}==") for pin in pins)
    named = [Path(word) for word in command_of(client) if word.startswith(str(SCRIPTS))]
    assert all(path.is_file() for path in named)
    assert not client.published or scripted_runs()[client.published].run.gpus == client.world_size
    assert bool(client.error) == (client.expected == "failed")


def test_a_client_is_one_dry_run_of_its_own_command() -> None:
    (client,) = load_clients(["accelerate"])
    words = command_of(client)
    assert words[: words.index("--")] == (
        "-m", "refshard", "dryrun", "--json", "--cluster", "dgx-h100", "--gpus", "8",
    )  # fmt: skip
    assert words[words.index("--") + 1 :][:2] == ("accelerate", "launch")
    variables = variables_of(client, Path("/env/bin/python"))
    assert variables["PATH"].startswith("/env/bin:")
    assert variables["HF_HUB_OFFLINE"] == "1"


def test_a_run_that_ends_in_another_way_than_expected_shows() -> None:
    (client,) = load_clients(["nanotron"])
    refused = Ended(
        client=client, version="0.2", outcome="failed", error="No module named 'flash_attn'", wall_s=2.4,
        peak_reserved_bytes=0, step_s=None,
    )  # fmt: skip
    assert refused.as_expected
    assert row(refused)[3:] == ("failed", "2 s", "-", "-", "-", "No module named 'flash_attn'")
    other = Ended(
        client=client, version="0.2", outcome="stepped", error="", wall_s=2.4, peak_reserved_bytes=3 << 29, step_s=0.25
    )
    assert not other.as_expected
    assert row(other)[3:] == ("stepped: NOT AS EXPECTED", "2 s", "1.50 GiB", "-", "250 ms", "")


@pytest.mark.processes
def test_a_checkout_is_its_commit_and_skipped_without_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLIENTS_CHECKOUTS", str(tmp_path))
    (client,) = load_clients(["nanogpt"])
    assert list(run_all([client])) == []
    assert "skipped: https://github.com/karpathy/nanoGPT cannot be cloned" in capsys.readouterr().err

    git = ["git", "-C", str(tmp_path / "nanoGPT"), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "nanoGPT")], check=True)
    (tmp_path / "nanoGPT" / "train.py").write_text("old")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "nanoGPT" / "train.py").write_text("changed")
    (tmp_path / "work").mkdir()
    check_out(msgspec.structs.replace(client, commit=commit), tmp_path / "work")
    assert (tmp_path / "work" / "train.py").read_text() == "old"


def test_memory_is_compared_by_what_was_published() -> None:
    clients = load_clients(["torchtitan", "torchtune-lora"])
    of = {"version": "1", "outcome": "stepped", "error": "", "wall_s": 1.0, "step_s": 0.5}
    ended = [Ended(client=c, peak_reserved_bytes=3 << 30, peak_active_bytes=9 << 30, **of) for c in clients]  # type: ignore[arg-type]
    assert [published(one) for one in ended] == ["47.82 GiB", "8.5 GiB active (here 9.00)"]


def test_an_unknown_client_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="there is no client 'torchtiatn'; there are: torchtitan,"):
        load_clients(["torchtiatn"])
