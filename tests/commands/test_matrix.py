"""A suite from the command line: options alone, over a suite, from standard input; written, and listed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from refshard import resources
from refshard.cli import app
from refshard.commands.matrix import Options, chosen_suite, keep
from refshard.errors import SpecError
from refshard.specs.suite import SuiteSpec, find_suite, load_suite, parse_suite
from refshard.specs.writing import to_toml

pytestmark = pytest.mark.slow

TWO_TABLES = """
name = "two"
rounds = 2
[[matrix]]
strategy = ["ddp", "fsdp2"]
rounds = 5
batch_per_rank = 2
[[matrix]]
strategy = "refshard-fsdp"
precision = "bf16"
[case]
model = "llama-tiny"
gpus = 2
global_batch = 8
seq_len = 64
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, for one test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(rounds: int | None = None, changes: Sequence[str] = (), **keys: str) -> Options:
    return Options(keys=keys, rounds=rounds, changes=changes)


def made(base: str | None = None, **given: Any) -> SuiteSpec:
    found = chosen_suite(base, options(**given))
    assert found is not None
    return found


def cases(suite: SuiteSpec) -> set[tuple[Any, ...]]:
    """What tells the cases apart, without references."""
    return {
        (c.job.strategy, c.job.model, c.job.gpus, c.job.global_batch, c.job.seq_len)
        for c in suite.cases()
        if c.job.strategy != "single"
    }


class TestOptionsAlone:
    """A suite without a file."""

    def test_lists_are_crossed(self) -> None:
        suite = made(strategy="ddp, fsdp2", model="llama-mini", gpus="2,4", rounds=3, changes=["seq_len=512"])
        assert suite.most_rounds == 3
        assert cases(suite) == {
            (strategy, "llama-mini", ranks, ranks, 512) for strategy in ("ddp", "fsdp2") for ranks in (2, 4)
        }

    def test_what_is_left_open_is_small(self) -> None:
        suite = made(strategy="ddp")
        assert cases(suite) == {("ddp", "llama-tiny", 2, 2, 256)}
        assert suite.most_rounds == 1

    def test_the_batch_may_be_that_of_all_ranks(self) -> None:
        assert cases(made(strategy="ddp", changes=["global_batch=8"])) == {("ddp", "llama-tiny", 2, 8, 256)}
        assert cases(made(strategy="ddp", changes=["batch_per_rank=3"])) == {("ddp", "llama-tiny", 2, 6, 256)}
        assert cases(made(strategy="ddp", microbatch="3", microbatches="2")) == {("ddp", "llama-tiny", 2, 12, 256)}
        assert cases(made(strategy="fsdp2", gpus="4", microbatch="1", changes=["tp=2"])) == {
            ("fsdp2", "llama-tiny", 4, 2, 256)
        }

    def test_counts_and_sizes_have_units(self) -> None:
        suite = made(strategy="ddp", gpus="2..8", seq_len="1k", changes=["memory_limit_gib=512MiB"])
        assert cases(suite) == {("ddp", "llama-tiny", ranks, ranks, 1024) for ranks in (2, 4, 8)}
        assert {case.protocol.memory_limit_gib for case in suite.cases() if case.job.strategy == "ddp"} == {0.5}

    def test_the_suite_itself_has_keys_too(self) -> None:
        suite = made(changes=["strategy=ddp", "name=mine", "about=why not", "dry_run_first=true"])
        assert (suite.name, suite.about, suite.dry_run_first) == ("mine", "why not", True)

    def test_values_are_as_in_toml_and_else_text(self) -> None:
        suite = made(
            strategy="ddp",
            changes=[
                "offload=true", "learning_rate = 1e-4", "checkpointing=[0, 5]", "precision=bf16",
                "memory_limit_gib=0.5",
            ],
        )  # fmt: skip
        (case,) = (case for case in suite.cases() if case.job.strategy == "ddp")
        assert (case.job.offload, case.protocol.learning_rate, case.job.checkpointing) == (True, 1e-4, (0, 5))
        assert (case.job.precision, case.protocol.memory_limit_gib) == ("bf16", 0.5)
        several = made(strategy="ddp", changes=["checkpointing=none,full,every-2", "seq_len=64,128"])
        assert {(c.job.checkpointing, c.job.seq_len) for c in several.cases() if c.job.strategy == "ddp"} == {
            (policy, length) for policy in ("none", "full", "every-2") for length in (64, 128)
        }

    def test_without_options_and_without_a_suite_there_is_none(self) -> None:
        assert chosen_suite(None, Options()) is None


class TestOverASuite:
    """Options replace the keys of the suite that is named."""

    def test_without_options_it_is_as_it_is(self) -> None:
        assert made("quickstart") == load_suite(find_suite("quickstart"))

    def test_keys_of_every_table_and_of_what_they_share_are_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "two.toml"
        path.write_text(TWO_TABLES)
        suite = made(str(path), strategy="refshard-zero2", gpus="4", rounds=1)
        assert suite.name == "two"
        assert suite.most_rounds == 1, "a table's own rounds go too"
        assert cases(suite) == {("refshard-zero2", "llama-tiny", 4, 8, 64)}
        assert {case.job.precision for case in suite.cases() if case.job.strategy != "single"} == {"fp32", "bf16"}

    @pytest.mark.parametrize(("change", "batch"), [("batch_per_rank=3", 6), ("global_batch=12", 12)])
    def test_one_batch_replaces_the_other(self, tmp_path: Path, change: str, batch: int) -> None:
        path = tmp_path / "two.toml"
        path.write_text(TWO_TABLES)
        assert {case[3] for case in cases(made(str(path), changes=[change]))} == {batch}

    def test_limits_of_the_gate_and_all_else_stay(self) -> None:
        suite, gate = made("gate", rounds=2), load_suite(find_suite("gate"))
        assert (suite.gate, suite.about, cases(suite)) == (gate.gate, gate.about, cases(gate))
        assert suite.most_rounds == 2


class TestMistakes:
    """Each names what is wrong, and the nearest that is right."""

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"rounds": 3}, "strategy: none given; add --strategy ddp,fsdp2, or name a suite"),
            (
                {"strategy": "ddp", "changes": ["seq_length=5"]},
                "set has the unknown key 'seq_length'; did you mean 'seq_len'?",
            ),
            ({"strategy": "ddp", "changes": ["seq_len"]}, "'seq_len' given; write key=value, such as seq_len=512"),
            ({"strategy": "ddp", "changes": ["seq_len= "]}, "'seq_len= ' given; write key=value"),
            ({"strategy": "ddp,,fsdp2"}, "'ddp,,fsdp2' has an empty value; separate values by single commas"),
            ({"strategy": ""}, "strategy: '' has an empty value"),
            ({"strategy": "ddp", "gpus": "2,"}, "gpus: '2,' has an empty value"),
            ({"strategy": "ddp", "rounds": 0}, "rounds must be >= 1"),
        ],
    )  # fmt: skip
    def test_a_wrong_option_is_refused(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError) as refused:
            chosen_suite(None, options(**given))
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--strategy", "ddpp"], "no strategy 'ddpp'; did you mean 'ddp'?"),
            (["--strategy", "ddp", "--model", "llama-tin"], "no preset 'llama-tin'; did you mean 'llama-tiny'?"),
            (["--strategy", "ddp", "--gpus", "two"], "gpus"),
            (["quickstart", "--only", "ddp-w2-llama-tiny-b2x25"], "did you mean 'ddp-w2-llama-tiny-b2x256'?"),
            (["quickstar"], "did you mean 'quickstart'?"),
            ([], "list: no suite given; name one, or add --strategy"),
        ],
    )
    def test_a_wrong_value_is_refused_before_anything_is_launched(self, words: list[str], message: str) -> None:
        done = CliRunner().invoke(app, ["run", *words, "--list"])
        assert isinstance(done.exception, SpecError)
        assert message in str(done.exception)


class TestStandardInput:
    """``refshard run -``."""

    def test_a_suite_is_read_from_it(self) -> None:
        done = CliRunner().invoke(app, ["run", "-", "--list", "--json"], input=TWO_TABLES)
        found = json.loads(done.stdout)
        assert found["suite"] == "two"
        assert {row["strategy"] for row in found["cases"]} == {"single", "ddp", "fsdp2", "refshard-fsdp"}

    @pytest.mark.parametrize("text", ["name = ", "", "nmae = 'a'"])
    def test_what_is_no_suite_is_a_mistake_that_names_it(self, text: str) -> None:
        done = CliRunner().invoke(app, ["run", "-", "--list"], input=text)
        assert isinstance(done.exception, SpecError)
        assert str(done.exception).startswith("standard input: ")


class TestWritten:
    """``--write`` keeps the suite as TOML."""

    @pytest.mark.parametrize("name", sorted(resources.suites()))
    def test_what_is_written_reads_back_as_it_was(self, name: str) -> None:
        suite = load_suite(find_suite(name))
        assert parse_suite(to_toml(suite), "written") == suite

    def test_options_become_a_file_that_runs_the_same_cases(self, tmp_path: Path) -> None:
        suite = made(
            strategy="ddp,fsdp2", gpus="2,4", rounds=3,
            changes=["checkpointing=[0, 5]", "about=a \"quoted\" line", "learning_rate=1e-4", "offload=false,true"],
        )  # fmt: skip
        path = tmp_path / "mine.toml"
        keep(suite, path)
        assert load_suite(path) == suite
        assert load_suite(path).cases(2) == suite.cases(2)
        assert made(str(path)) == suite

    def test_what_is_as_by_default_is_left_out(self) -> None:
        assert [line for line in to_toml(made(strategy="ddp")).splitlines() if line.startswith("[")] == ["[matrix]"]

    def test_it_may_go_to_standard_output_and_the_list_then_goes_to_standard_error(self) -> None:
        done = CliRunner().invoke(app, ["run", "--strategy", "ddp", "--list", "--write", "-"])
        assert parse_suite(done.stdout, "stdout") == made(strategy="ddp")
        assert "2 launches" in done.stderr

    def test_a_file_that_cannot_be_written_is_a_mistake(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"write: .*mine.toml cannot be written \(No such file or directory\)"):
            keep(made(strategy="ddp"), tmp_path / "none" / "mine.toml")


class TestDryRun:
    """``--list`` lists and launches nothing; a test without a marker may start no process."""

    def test_it_lists_cases_and_the_expected_duration(self, elsewhere: Path) -> None:
        done = CliRunner().invoke(app, ["run", "quickstart", "--list"])
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("quickstart: llama-tiny")
        assert "refshard-yafsdp-w2-llama-tiny-b2x256" in done.stdout
        assert done.stdout.splitlines()[-1].startswith("18 launches in 3 rounds, about ")
        assert done.stdout.endswith("(estimated from earlier launches).\n")
        assert list(elsewhere.iterdir()) == []

    def test_rounds_are_as_many_as_asked_for(self, elsewhere: Path) -> None:
        words = ["run", "--strategy", "ddp", "--set", "device=cpu", "--rounds", "3", "--list"]
        shown = CliRunner().invoke(app, words).stdout
        assert shown.splitlines()[-1].startswith("6 launches in 3 rounds, about ")

    def test_what_has_not_run_before_is_a_rough_estimate(self, elsewhere: Path) -> None:
        words = ["run", "--strategy", "ddp", "--set", "seq_len=8", "--set", "device=cpu", "--list"]
        done = CliRunner().invoke(app, words)
        assert done.stdout.splitlines()[-1].startswith("2 launches, about ")
        assert done.stdout.endswith("(a rough estimate).\n")
        found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert (found["launches"], found["suite"]) == (2, "command-line")
        assert found["expected_s"] > 0
        assert [row["strategy"] for row in found["cases"]] == ["single", "ddp"]
        assert list(elsewhere.iterdir()) == []

    def test_more_ranks_than_the_machine_has_may_be_listed(self, elsewhere: Path) -> None:
        words = ["run", "--strategy", "ddp", "--gpus", "4096", "--set", "device=cuda", "--list"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        told = "2 launches; duration unknown for 2: no similar launch is recorded."
        assert done.stdout.splitlines()[-1] == told
        found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert found["expected_s"] is None

    def test_cases_may_be_chosen_and_become_dry_runs(self) -> None:
        words = ["run", "gate_cuda", "--list", "--json"]
        every = json.loads(CliRunner().invoke(app, words).stdout)["cases"]
        only = json.loads(CliRunner().invoke(app, [*words, "--only", every[0]["case"]]).stdout)["cases"]
        assert only == every[:1]
        quickstart = ["run", "quickstart", "--set", "device=auto", "--list", "--json"]
        chosen = ["--only", "ddp-w2-llama-tiny-b2x256"]
        found = json.loads(CliRunner().invoke(app, [*quickstart, *chosen]).stdout)["cases"]
        assert [row["strategy"] for row in found] == ["single", "ddp"]
        dry = json.loads(CliRunner().invoke(app, [*quickstart, *chosen, "--cluster", "dgx-h100"]).stdout)["cases"]
        assert [(row["strategy"], row["fidelity"]) for row in dry] == [("ddp", "dryrun")]

    def test_what_no_dry_run_can_be_is_a_mistake_whether_cases_are_chosen_or_not(self) -> None:
        for chosen in ([], ["--only", "ddp-w2-llama-tiny-b2x256"]):
            done = CliRunner().invoke(app, ["run", "quickstart", *chosen, "--cluster", "dgx-h100", "--list"])
            assert isinstance(done.exception, SpecError)
            assert str(done.exception).startswith("case: device must be 'auto' or 'cuda' for dryrun cases")

    @pytest.mark.parametrize("name", ["gpu_8", "llama3_8b_h100", "emulated_gpu"])
    def test_a_suite_that_cannot_run_here_is_listed_all_the_same(self, name: str) -> None:
        done = CliRunner().invoke(app, ["run", name, "--list", "--json"])
        assert done.exit_code == 0, done.exception
        assert json.loads(done.stdout)["cases"]
