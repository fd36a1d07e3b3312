"""``refshard doctor``: its JSON and its exit status; its text is a golden."""

import json

import pytest
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.doctor import report
from refshard.measure.doctor import Facts, abilities, findings
from tests.measure.doctor.machines import CPU_ONLY, with_gpu
from tests.report.printed import as_csv, as_json, verdict


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
