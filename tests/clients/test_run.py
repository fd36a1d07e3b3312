"""The table of clients, without running any."""

from pathlib import Path

import pytest

from tests.clients.run import HERE, SCRIPTS, Ended, command_of, load_clients, row, variables_of
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


def test_an_unknown_client_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="there is no client 'torchtiatn'; there are: torchtitan,"):
        load_clients(["torchtiatn"])
