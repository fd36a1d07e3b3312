"""``refshard validate`` without a run: published runs and claims beside their predictions."""

from collections import Counter
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.validate import validate
from refshard.errors import SpecError
from refshard.report.blocks import Answer
from tests.report.printed import as_csv, as_json, notes, rows, tables, text, verdict
from validation.closed_form import Predicted, load_runs, predicted
from validation.schema import load_sources

pytestmark = pytest.mark.slow

TITLES = [
    "Predicted step times against published ones", "Scaling loss per GPU",
    "Compared with the sources' own predictions", "Headline claims", "Every curve", "Every run",
]  # fmt: skip
TABLE = """\
title = "mine"
source = "our cluster, November 2026"
clusters = { h100-sxm-80gb = "dgx-h100" }
"""
RUN = {
    "model": "llama3-8b", "gpus": 16, "hardware": "h100-sxm-80gb", "precision": "bf16", "seq_len": 8192,
    "microbatch": 1, "microbatches": 2, "dp_shard": 16, "checkpointing": "full", "strategy": "fsdp2", "seconds": 3.0,
}  # fmt: skip


@cache
def answer() -> Answer:
    """Everything that ships; seconds, so once."""
    return validate(None)


@cache
def expected() -> tuple[list[Predicted], Counter[tuple[str, str]]]:
    """The runs that are predicted, and how many are not."""
    runs, left = load_runs()
    return predicted(runs), left


def mine(folder: Path, *runs: dict[str, Any], head: str = TABLE) -> Path:
    """A table of one's own."""
    path = folder / "mine.toml"
    fields = ["\n".join(["[[runs]]", *(f"{key} = {_toml(value)}" for key, value in run.items())]) for run in runs]
    path.write_text("\n".join([head, *fields]))
    return path


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def refused(run: Path | None = None, **asked: Any) -> str:
    with pytest.raises(SpecError) as error:
        validate(run, **asked)
    return str(error.value)


def test_the_tables_are_by_source_of_scaling_of_claims_and_in_detail_of_every_run() -> None:
    assert [one.title for one in tables(answer())] == TITLES
    assert [one.title for one in tables(answer(), detail=True)] == TITLES[4:]
    by_source, every = rows(tables(answer())[0]), rows(tables(answer())[5])
    assert sum(int(row["runs"]) for row in by_source) == len(every) == len(expected()[0])
    assert {row["source"] for row in by_source} == {one.published.table for one in expected()[0]}


def test_the_verdict_is_of_the_held_out_half() -> None:
    held = [one for one in expected()[0] if one.published.half == "held out"]
    sentences = []
    for name, routed in (("dense models", False), ("mixtures of experts", True)):
        errors = sorted(abs(one.error) for one in held if (one.published.model.experts is not None) == routed)
        sentences.append(
            f"Step time, {len(errors)} held-out runs of {name}: median error {100 * median(errors):.1f} %, 9 of 10 "
            f"within {100 * errors[int(0.9 * (len(errors) - 1))]:.1f} %, worst {100 * errors[-1]:.1f} %."
        )
    assert verdict(answer()) == sentences
    errors = sorted(abs(one.error) for one in held)
    assert as_json(answer())["held_out"] == {
        "runs": len(errors), "median_error": pytest.approx(median(errors)), "worst_error": pytest.approx(errors[-1]),
    }  # fmt: skip


def test_json_holds_every_run_as_it_is_predicted() -> None:
    found = as_json(answer())
    predictions, left = expected()
    for row, one in zip(found["runs"], predictions, strict=True):
        run = one.published
        assert (row["table"], row["model"], row["gpus"]) == (run.table, run.run.model, run.run.gpus)
        assert row["half"] == run.half
        assert (row["published_s"], row["predicted_s"]) == (pytest.approx(run.seconds), pytest.approx(one.seconds))
        assert row["error"] == pytest.approx(one.seconds / run.seconds - 1)
        assert row["predicted_allocated_gib"] == pytest.approx(one.allocated_gib)
    assert {(one["table"], one["reason"]): one["runs"] for one in found["not_predicted"]} == left


def test_csv_holds_a_line_for_each_run_with_every_field_of_its_json() -> None:
    lines, runs = as_csv(answer()), as_json(answer())["runs"]
    assert len(lines) == len(runs)
    for line, run in zip(lines, runs):
        assert line.keys() - {"schema_version"} == run.keys()
        assert {key: _cell(value) for key, value in run.items()} == {key: line[key] for key in run}


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def test_runs_that_are_not_predicted_are_counted_and_their_reasons_told_with_verbose() -> None:
    count = sum(expected()[1].values())
    assert f"* {count} more runs are not predicted" in text(answer())
    assert "Not predicted:" not in text(answer()).split("Headline claims")[1].split("\n* ")[1]
    told = [note for note in notes(answer()) if note.startswith("Not predicted: ")]
    assert sum(int(note.split()[2]) for note in told) == count
    assert told[0] in " ".join(text(answer(), verbose=True).split())


def test_every_claim_has_a_row_with_its_ratio_and_a_cause_or_what_is_missing() -> None:
    claims = [claim for source in load_sources().values() for claim in source.claims]
    shown = rows(tables(answer())[3])
    assert len(shown) == len(claims) == len(as_json(answer())["claims"])
    for row, claim in zip(shown, claims):
        assert row["claim, and its setting"].startswith(claim.name)
        assert row["published"] == f"{100 * (claim.ratio - 1):+.1f} %"
        assert bool(row["predicted"]) == (claim.claimed is not None)
        told = claim.cause if row["predicted"] else f"Not predicted: {claim.missing}."
        assert row["cause of the difference"] == told


def test_a_table_of_ones_own_is_predicted_and_all_of_it_is_held_out(tmp_path: Path) -> None:
    found = validate(None, published=mine(tmp_path, RUN, {**RUN, "gpus": 32, "dp_shard": 32}, {**RUN, "seq_len": 4096}))
    runs = as_json(found)["runs"]
    assert [(row["table"], row["gpus"], row["half"]) for row in runs] == [
        ("mine", 16, "held out"), ("mine", 32, "held out"), ("mine", 16, "held out"),
    ]  # fmt: skip
    assert all(1 < row["predicted_s"] < 10 for row in runs)
    assert verdict(found)[0].startswith("Step time, 3 held-out runs of dense models: ")
    assert (notes(found), as_json(found)["claims"]) == ([], [])


def test_a_copy_of_a_table_that_ships_has_its_halves(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "validation" / "published" / "yafsdp.toml"
    assert {row["half"] for row in as_json(validate(None, published=shipped))["runs"]} == {"fit", "held out"}
    renamed = tmp_path / "mine.toml"
    renamed.write_text(shipped.read_text())
    assert {row["half"] for row in as_json(validate(None, published=renamed))["runs"]} == {"held out"}


def test_runs_of_ones_own_that_say_too_little_are_told_beside_those_that_are_predicted(tmp_path: Path) -> None:
    silent = {key: value for key, value in RUN.items() if key != "checkpointing"}
    found = validate(None, published=mine(tmp_path, RUN, silent))
    assert as_json(found)["not_predicted"] == [{"table": "mine", "reason": "checkpointing: not stated", "runs": 1}]
    assert "Not predicted: 1 of mine: checkpointing: not stated" in notes(found)


def test_a_table_without_a_run_that_can_be_predicted_is_refused_with_the_reasons(tmp_path: Path) -> None:
    path = mine(tmp_path, {**RUN, "strategy": "psgd"}, {**RUN, "hardware": "abacus"}, {**RUN, "strategy": "psgd"})
    reasons = "no closed form of psgd; no cluster profile for abacus"
    assert refused(published=path) == f"published: no run of {path} can be predicted: {reasons}; complete the table"


def test_an_unknown_key_a_wrong_value_and_a_missing_file_are_refused_by_name(tmp_path: Path) -> None:
    told = refused(published=mine(tmp_path, {**RUN, "sequence_len": 8192}))
    assert told.startswith("published mine: ")
    assert "'sequence_len'" in told
    assert "seq_len" in told
    assert "gpus must be >= 1, got 0" in refused(published=mine(tmp_path, {**RUN, "gpus": 0}))
    assert "must divide the 16 GPUs, got 3" in refused(published=mine(tmp_path, {**RUN, "tp": 3}))
    assert "cannot be read" in refused(published=tmp_path / "none.toml")
    assert "not valid TOML" in refused(published=mine(tmp_path, RUN, head="title = \n"))


def test_the_command_line_prints_the_answer(tmp_path: Path) -> None:
    path = mine(tmp_path, RUN)
    done = CliRunner().invoke(app, ["validate", "--published", str(path)])
    assert done.exit_code == 0, done.output
    assert "mine h100-sxm-80gb bf16 1" in " ".join(done.output.split())
    assert "Step time, 1 held-out runs of dense models" in done.output
