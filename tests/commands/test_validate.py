"""``refshard validate``: its options, and what a wheel says."""

from pathlib import Path
from typing import Any

import pytest

from refshard import resources
from refshard.commands.validate import validate
from refshard.errors import SpecError, StoreError


def refused(run: Path | None = None, **given: Any) -> str:
    with pytest.raises(SpecError) as error:
        validate(run, **given)
    return str(error.value)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    table, run = tmp_path / "mine.toml", tmp_path / "run"
    assert refused(fidelity="emulated") == "fidelity must be plan or dryrun, got 'emulated'; choose one of them"
    assert refused(fidelity="simulated") == "fidelity must be plan or dryrun, got 'simulated'; now --fidelity plan"
    assert refused(fidelity="dryrun", published=table) == (
        f"published: tables are predicted in closed form, got fidelity dryrun and {table}; leave out one of them"
    )
    only = "only: selects published runs to dry-run, got fidelity plan; add --fidelity dryrun"
    assert refused(only="llama") == only
    assert refused(only="llama", published=table) == only
    assert refused(run, published=table) == (
        f"published: compares a table, but a run is given too: {run}; leave out one of them"
    )
    assert refused(run, fidelity="dryrun") == (
        f"fidelity dryrun predicts published runs, but a run is given: {run}; leave out one of them"
    )
    told = refused(fidelity="dryrun", only="gpt-9")
    assert told.startswith("only: no published run's name holds 'gpt-9'; choose from: ")
    assert "llama3-8b-h100x8-2025-10" in told


def test_a_refshard_without_a_checkout_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a wheel, beside which another package may be called validation."""
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    remedy = "run `refshard validate` from a clone of the repository, or give the folder of a run"
    assert refused() == f"published results are part of a checkout, got a refshard without one; {remedy}"
    assert refused(fidelity="dryrun").endswith(remedy)
    with pytest.raises(StoreError, match="there is no such run"):
        validate(tmp_path / "none")
