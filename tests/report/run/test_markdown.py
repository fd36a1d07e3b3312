"""The terminal's twin for pull requests."""

from dataclasses import replace

from refshard.analysis.evidence import gather
from refshard.report.run.markdown import as_markdown, inline
from tests.report.runs import CASES, HOSTILE, run


def test_the_verdict_is_a_list_and_each_setting_a_table() -> None:
    text = as_markdown(gather(run()))
    lines = text.splitlines()
    assert lines[:3] == ["## quickstart", "", "- refshard-yafsdp is fastest at 40.0 ms per step."]
    assert "### llama-mini, global batch of 8 sequences of 256 tokens" in lines
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 6
    assert len({line.count("|") for line in rows}) == 1
    assert rows[3].split("|")[1:4] == [" ddp             ", " 2       ", " ok      "]


def test_names_and_errors_are_shown_as_they_are() -> None:
    made = run([replace(CASES[1], strategy=f"a|b`{HOSTILE}")], rounds=1)
    text = as_markdown(gather(made))
    assert "<script>" not in text
    assert "a\\|b\\`\\</script\\>\\<script\\>" in text
    assert "\x1b" not in text


def test_a_log_cannot_begin_a_line_of_its_own() -> None:
    assert inline("error\n# heading\n| a |") == "error \\# heading \\| a \\|"
