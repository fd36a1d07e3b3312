"""``refshard doctor``: its text, its JSON and its exit status."""

import json

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.doctor import report
from refshard.measure.doctor import Facts, abilities, findings
from tests.measure.doctor.machines import CPU_ONLY, DGX, with_gpu
from tests.report.printed import as_csv, as_json, rows, tables, text, verdict


def test_a_machine_with_gpus_is_described_without_a_line_over_120_columns() -> None:
    facts = replace(DGX, variables={"NCCL_ALGO": "Ring"}, unavailable={f"strategy-{n}": "" for n in range(20)})
    found = report(facts)
    machine, can = tables(found)
    described = {row["this machine"]: row[""] for row in rows(machine)}
    assert described.items() >= {
        ("GPUs", "4 x NVIDIA H100 80GB HBM3, 79.2 GiB"), ("GPU software", "driver 570.86.15, CUDA 12.8"),
        ("power limits", "700 W"), ("NVLinks", "18 to switch"), ("variables", "NCCL_ALGO=Ring"),
    }  # fmt: skip
    assert {"what": "measured on GPUs", "runs here": "yes", "how": "up to 4 ranks: NVIDIA H100 80GB HBM3"} in rows(can)
    assert verdict(found) == ["This machine can measure. Nothing is wrong."]
    for width in (80, 120, None):
        assert max(map(len, text(found, width).splitlines())) <= (width or 120)


def test_a_setting_in_which_gpus_differ_is_told_of_each() -> None:
    found = report(with_gpu(1, "settings", power_limit_w=500.0))
    machine, _, wrong = tables(found)
    limits = "GPU 0: 700 W; GPU 1: 500 W; GPU 2: 700 W; GPU 3: 700 W"
    assert {"this machine": "power limits", "": limits} in rows(machine)
    assert rows(wrong) == [
        {
            "finding": "warning",
            "what is wrong, and the remedy": "GPU 1 is limited to 500 of 700 W "
            "Remedy: nvidia-smi -pl 700, or say so with the results",
        }
    ]
    assert verdict(found) == ["This machine can measure; see the warnings above."]


@pytest.mark.parametrize(
    ("facts", "status"),
    [(CPU_ONLY, 0), (with_gpu(1, "settings", power_limit_w=500.0), 0), (with_gpu(1, "settings", mig=True), 1)],
)
def test_the_exit_status_is_that_of_errors_only(facts: Facts, status: int) -> None:
    answer = report(facts)
    assert answer.status == status
    assert verdict(answer)[0].endswith("measurements wrong or impossible here.") == bool(status)
    found = as_json(answer)
    assert found["facts"]["cores"] == facts.cores
    severities = [one.severity for one in findings(facts)]
    assert [one["severity"] for one in found["findings"]] == [row["severity"] for row in as_csv(answer)] == severities
    assert len(found["abilities"]) == len(abilities(facts))


@pytest.mark.processes
def test_the_command_describes_this_machine() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(done.output)
    assert done.exit_code == int(any(one["severity"] == "error" for one in found["findings"]))
    assert found["facts"]["torch"]["version"]
