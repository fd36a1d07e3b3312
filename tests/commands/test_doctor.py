"""``refshard doctor``: its text, its JSON and its exit status."""

import json

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.doctor import report, text
from refshard.harness.doctor.abilities import abilities
from refshard.harness.doctor.facts import Facts
from refshard.harness.doctor.findings import findings
from tests.harness.doctor.machines import CPU_ONLY, DGX, with_gpu


def printed(facts: Facts) -> str:
    return text(facts, abilities(facts), findings(facts))


def test_a_machine_with_gpus_is_described_without_a_line_over_120_columns() -> None:
    found = printed(replace(DGX, variables={"NCCL_ALGO": "Ring"}, unavailable={f"strategy-{n}": "" for n in range(20)}))
    for line in (
        "  GPUs          4 x NVIDIA H100 80GB HBM3, 79.2 GiB",
        "  GPU software  driver 570.86.15, CUDA 12.8",
        "  power limits  700 W",
        "  NVLinks       18 to switch",
        "  variables     NCCL_ALGO=Ring",
        "  measured on GPUs       yes: up to 4 ranks: NVIDIA H100 80GB HBM3",
        "Nothing found that is wrong.",
    ):
        assert line in found.splitlines()
    assert max(map(len, found.splitlines())) <= 120


def test_a_setting_in_which_gpus_differ_is_told_of_each() -> None:
    found = printed(with_gpu(1, "settings", power_limit_w=500.0))
    assert "  power limits  GPU 0: 700 W; GPU 1: 500 W; GPU 2: 700 W; GPU 3: 700 W" in found.splitlines()
    assert found.splitlines()[-2:] == [
        "  warning  GPU 1 is limited to 500 of 700 W",
        "           To correct it: nvidia-smi -pl 700, or say so with the results",
    ]


@pytest.mark.parametrize(
    ("facts", "status"),
    [(CPU_ONLY, 0), (with_gpu(1, "settings", power_limit_w=500.0), 0), (with_gpu(1, "settings", mig=True), 1)],
)
def test_the_exit_status_is_that_of_errors_only(facts: Facts, status: int) -> None:
    assert report(facts, as_json=False) == (printed(facts), status)
    as_json, same = report(facts, as_json=True)
    assert same == status
    found = json.loads(as_json)
    assert found["facts"]["cores"] == facts.cores
    assert [one["severity"] for one in found["findings"]] == [one.severity for one in findings(facts)]
    assert len(found["abilities"]) == len(abilities(facts))


@pytest.mark.processes
def test_the_command_describes_this_machine() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(done.output)
    assert done.exit_code == int(any(one["severity"] == "error" for one in found["findings"]))
    assert found["facts"]["torch"]["version"]
