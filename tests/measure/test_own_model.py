"""A suite that names a factory or a config.json: from the page's example to records, and what a run keeps of it."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from refshard.errors import SpecError
from refshard.measure.assemble import rates, recompute_text
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import check_suite, named_files, resume_run, run_suite
from refshard.records import Run
from refshard.specs.model import load_model
from refshard.specs.suite import SuiteSpec, load_suite
from tests.fakecuda.needs import needs_device
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "measure.md"
OWN = "tests.strategies.test_own_models:untied"


def block(language: str) -> str:
    """The block of code in this language, in the page's section on own models."""
    section = PAGE.read_text().partition("## Measure your own model")[2]
    found = re.search(rf"^```{language}\n(.*?)^```", section, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteSpec:
    """The page's suite, with its module in the current folder."""
    pytest.importorskip("transformers", reason="needs the extra 'peers'")
    (tmp_path / "mymodels.py").write_text(block("python"))
    (tmp_path / "own.toml").write_text(block("toml"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return load_suite(tmp_path / "own.toml")


def run(suite: SuiteSpec, folder: Path) -> Run:
    return run_suite(suite, folder, LocalLauncher(), Silent(), ENVIRONMENT, oversubscribe=True)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_pages_example_is_measured_and_proven(suite: SuiteSpec, tmp_path: Path) -> None:
    launches = run(suite, tmp_path / "run").launches
    assert [(record.state, record.error) for record in launches] == [("ok", None)] * 4
    for record in launches:
        assert record.flops_convention == "matrix products, attention and convolutions, counted by torch"
        assert record.flops_per_token == launches[0].flops_per_token
        assert record.metrics["tflops"]
        assert record.proof is not None
        assert record.proof.loss_parity is not None
        assert record.proof.loss_parity < 1e-5
        assert record.proof.announced == record.proof.traced


@pytest.mark.full
@needs_device
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_pages_example_is_dry_run_on_gpus_that_are_not_here(suite: SuiteSpec, tmp_path: Path) -> None:
    launches = run(suite.as_dry_run("dgx-h100"), tmp_path / "run").launches
    assert {record.case.job.strategy: (record.state, record.error) for record in launches} == dict.fromkeys(
        ["ddp", "fsdp2", "refshard-yafsdp"], ("ok", None)
    )
    assert all(record.flops_per_token and record.metrics["mfu"] for record in launches)


def own_suite(model: str, **case: object) -> SuiteSpec:
    matrix = {"strategy": ["ddp"], "gpus": [2], "model": [model]}
    return make_suite(matrix=matrix, case={"global_batch": 4, "device": "cpu", **case})


@pytest.mark.parametrize(
    ("model", "case", "words"),
    [
        ("no_such.models:build", {}, "needs the module 'no_such'"),
        (f"{OWN}ed", {}, "has no 'untieded'"),
        (OWN, {"data": "tokens.npy"}, f"data: the factory '{OWN}' makes its own batches, got 'tokens.npy'"),
    ],
)
def test_mistakes_are_found_before_anything_is_launched(model: str, case: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_suite(own_suite(model, **case), FakeLauncher(), oversubscribe=True)
    assert words in str(refused.value)


def test_a_run_knows_the_factorys_file_by_the_factorys_name() -> None:
    (name,) = named_files(own_suite(OWN).cases())
    assert name == OWN


def test_a_run_keeps_the_dimensions_of_a_file_and_is_not_resumed_without_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config.write_text(json.dumps(fields))
    spec, suite = load_model(str(config)), own_suite(str(config))
    header = run_suite(suite, tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT).header
    assert (header.models, list(header.files)) == ({str(config): spec}, [str(config)])
    config.unlink()
    with pytest.raises(SpecError, match=r"the file of .*config.json is missing; start a new run"):
        resume_run(tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)


def test_recomputed_layers_are_told_of_as_many_as_the_module_has() -> None:
    case = own_suite(OWN).cases()[-1].changed(checkpointing="every-2")
    assert recompute_text(case, 5) == "forward of 2 of 5 layers, not counted"


def test_flops_that_are_not_known_are_absent_not_zero(tmp_path: Path) -> None:
    record = run_suite(make_suite(), tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT).launches[-1]
    unknown = rates(msgspec.structs.replace(record, flops_per_token=None), 0.5)
    assert (unknown["tflops"], unknown["mfu"]) == (None, None)
    assert unknown["tokens_per_s_gpu"]
