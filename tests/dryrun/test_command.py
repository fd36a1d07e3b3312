"""``refshard dryrun`` as a user runs it: each test is one run of a script on the fake device."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from refshard.commands.dryrun import words_of_text
from refshard.dryrun.analyse import analyse
from refshard.dryrun.measured_prices import read_measured
from refshard.dryrun.request import Request
from refshard.dryrun.run import dry_run
from refshard.errors import SpecError
from refshard.specs.cluster import load_cluster
from tests.dryrun import scripts
from tests.fakecuda.needs import needs_device
from tests.gpu.quick.cases import SCRIPT, of_fake_backend, read_cases
from tests.measure.commandline import status_of

pytestmark = [needs_device, pytest.mark.processes]
MIB = 2**20
RECORDS = Path("profiles/recorded/h200")


def run(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", *options, "--", str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1800)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    done = run(folder, scripts.TRAIN, "--json", "--trace", "trace.json", "--tokens-per-step", "4096")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, folder


def test_the_script_stops_after_the_steps_asked_for(trained: tuple[dict[str, Any], str, Path]) -> None:
    found, printed, _ = trained
    assert found["answer"]["outcome"] == "stepped"
    assert found["answer"]["steps_taken"] == 3
    assert re.findall(r"^step (\d+)", printed, re.MULTILINE) == ["0", "1"]  # the third ends in its optimizer


def test_sharded_state_is_an_eighth_of_the_model(trained: tuple[dict[str, Any], str, Path]) -> None:
    found, _, _ = trained
    parameters = 4 * 1024 * 1024
    assert found["answer"]["parameters"] == parameters
    by_category = found["peak_by_category"]
    assert by_category["parameters"] == parameters * 4 // 8
    # Two moments each, and a step counter of 512 bytes a parameter.
    assert by_category["optimizer"] == 2 * parameters * 4 // 8 + 4 * 512


def test_flops_are_those_of_the_matrix_products(trained: tuple[dict[str, Any], str, Path]) -> None:
    found, _, _ = trained
    # Forward, and in backward the gradients of four weights and of three inputs.
    assert found["model_flops"] == (4 + 4 + 3) * 2 * 512 * 1024 * 1024
    assert found["tokens_per_s_gpu"] == pytest.approx(4096 / 8 / found["step_s"])
    assert 0 < found["mfu"] < 1


def test_the_line_that_synchronises_is_named(trained: tuple[dict[str, Any], str, Path]) -> None:
    found, _, _ = trained
    line = scripts.TRAIN.splitlines().index('    print("step", step, loss.item())') + 1
    items = [one for one in found["host_synchronisations"] if one["why"] == "item"]
    assert [(one["site"], one["count"], one["value_unknown"]) for one in items] == [
        (f"train.py:{line} in <module>", 1, True)
    ]


def test_the_trace_shows_every_unit_gathered_and_reduced(trained: tuple[dict[str, Any], str, Path]) -> None:
    _, _, folder = trained
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    collectives = [e["args"]["Collective name"] for e in kernels if "Collective name" in e["args"]]
    # The two steps after the first. FSDP2 reshards each unit after its forward, and gathers it again for its backward.
    assert Counter(collectives) == {"reduce_scatter": 2 * 4, "all_gather": 2 * 8}


@pytest.mark.full
def test_a_script_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.FAILS)
    assert done.returncode == 1
    assert re.search(r"FAILED: RuntimeError: .* at train.py:5 in shapes$", " ".join(done.stdout.split()))


def test_what_does_not_fit_says_what_it_needs_and_what_was_refused(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.TOO_LARGE, "--gpus", "1")
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "DOES NOT FIT: needs 120 GiB reserved, 41.6 GiB more than 78.4 GiB; peak allocated 120 GiB" in words
    assert "Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 2.43 GiB is free. At" in words
    assert re.search(r"At train.py:3 in <(listcomp|module)>\.", words)


@pytest.mark.full
def test_expandable_segments_have_addresses_where_memory_has_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    words = " ".join(run(tmp_path, scripts.TOO_LARGE, "--gpus", "1").stdout.split())
    assert "DOES NOT FIT: needs 120 GiB reserved, 41.6 GiB more than 78.4 GiB; peak allocated 120 GiB" in words


@pytest.mark.full
def test_python_on_one_gpu_has_no_launcher(tmp_path: Path) -> None:
    """Scripts choose between one process and DDP by torchrun's variables."""
    (tmp_path / "train.py").write_text("import os\nraise ValueError(os.environ.get('RANK'))\n")
    for words, rank in ((("python", "train.py"), "None"), (("train.py",), "0")):
        command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--gpus", "1", "--", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
        assert f"FAILED: ValueError: {rank}" in done.stdout


@pytest.mark.full
def test_what_would_not_fit_any_gpu_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.ENDLESS, "--gpus", "1")
    assert done.returncode == 1
    assert "DOES NOT FIT: needs more than 78.4 GiB" in done.stdout


@pytest.mark.full
def test_what_does_not_fit_is_explained_by_a_run_without_a_limit(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.TOO_LARGE_IN_BACKWARD, "--json", "--gpus", "1")
    found = json.loads(done.stdout)
    assert not found["fits"]
    assert found["refused"]["outcome"] == "oom"
    assert found["refused"]["steps_taken"] == 0
    assert found["answer"]["steps_taken"] == 1
    held = found["peak_by_category"]
    assert held["parameters"] == 40 * 2**30
    assert held["gradients"] >= 40 * 2**30
    assert held["other"] == 2**20  # what the model is given


@pytest.mark.full
def test_objects_of_another_rank_cannot_be_received(tmp_path: Path) -> None:
    assert "NO VERDICT" in run(tmp_path, scripts.RECEIVES, "--gpus", "2").stdout  # it takes no step, but does not fail
    done = run(tmp_path, scripts.RECEIVES, "--gpus", "2", "--rank", "1")
    assert done.returncode == 1
    assert "run the rank that sends it (--rank, usually 0)" in done.stdout
    assert "at train.py:6 in <module>" in done.stdout


@pytest.mark.full
def test_parameters_are_known_before_an_optimizer_steps(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, scripts.FORWARD, "--json", "--gpus", "1").stdout)
    assert found["peak_by_category"]["parameters"] == 4 * 2**20


@pytest.mark.full
def test_small_integers_are_computed_and_what_is_not_computed_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.READS, "--json", "--steps", "1", "--gpus", "1")
    assert done.returncode == 0, done.stderr
    syncs = {one["site"]: one["value_unknown"] for one in json.loads(done.stdout)["host_synchronisations"]}
    assert syncs == {
        "train.py:5 in <module>": False,
        "train.py:6 in <module>": True,
        "train.py:7 in <module>": True,
    }


@pytest.mark.full
def test_two_dry_runs_of_a_script_are_the_same_to_the_bit(tmp_path: Path) -> None:
    first, second = (json.loads(run(tmp_path, scripts.TRAIN, "--json").stdout) for _ in range(2))
    for found in (first, second):
        for name in ("wall_s", "host_peak_bytes"):
            del found["answer"][name]
    assert first == second


BUFFER = 256 * 4 * 8
"""Bytes of one token in the buffers of all experts."""


@pytest.fixture(scope="module", params=["balanced", "worst"])
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    script = scripts.ROUTED.replace("SIZED", "True")
    done = run(tmp_path_factory.mktemp("routed"), script, "--json", "--gpus", "1", "--routing", request.param)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def test_memory_is_known_under_the_assumed_routing_and_at_worst(routed: tuple[str, dict[str, Any]]) -> None:
    rule, found = routed
    peaks = {name: answer["peak"]["allocated"] for name, answer in found["by_routing"].items()}
    assert list(peaks) == ["balanced", "worst"]
    # The buffer and the product: for 1,024 tokens an expert, or for all 8,192.
    assert peaks["worst"] - peaks["balanced"] == 2 * (8192 - 1024) * BUFFER
    assert found["peak_allocated_bytes"] == peaks[rule]
    assert found["says"][1] == f"Routing: assumed {rule}; the model chooses 1 of 8."


@pytest.mark.full
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_mixtures_of_experts_of_transformers_run(tmp_path: Path, family: str, experts: str) -> None:
    pytest.importorskip("transformers", reason="it comes with the extra 'peers'")
    script = scripts.TRANSFORMERS.replace("FAMILY", family).replace("EXPERTS", experts)
    done = run(tmp_path, script, "--json", "--gpus", "1", "--steps", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    choices = {(one["operator"], one["count"], one["among"]) for one in found["answer"]["choices"]}
    assert choices == {("aten::topk", 4, 16)}
    # A loop over the experts that have tokens makes the host wait for their numbers; a grouped product does not.
    assert list(found["by_routing"]) == (["balanced", "worst"] if experts == "eager" else [])


def test_no_size_depends_on_a_choice_that_the_host_does_not_read(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.ROUTED.replace("SIZED", "False"), "--gpus", "1", "--routing", "zipf:1.5")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "Routing: assumed zipf:1.5; the model chooses 1 of 8. No size in the model depends on it." in text
    assert "Routing worst" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--routing", "zipf:0", "--", "train.py"], "routing must be balanced, zipf:S (the exponent S > 0, such as"),
        (["--routing", "worse", "--", "train.py"], "zipf:1.2) or worst, got 'worse'"),
        (["--", "nothere.py"], "there is no script 'nothere.py'"),
        (["--gpus", "0", "--", "train.py"], "gpus must be >= 1, got 0"),
        (["--rank", "9", "--", "train.py"], "rank must be"),
        (["--ranks", "0,9", "--", "train.py"], "ranks must be from 0 to 7 with 8 GPUs, got 9"),
        (["--ranks", "0;9", "--", "train.py"], "ranks must be all, distinct or numbers such as 0,1,7, got '0;9'"),
        (["--ranks", "all", "--rank", "0", "--", "train.py"], "--ranks and --rank exclude each other, got both"),
        (["--ranks", "all", "--compile", "both", "--", "train.py"], "--ranks and --compile both exclude each other"),
        (["--steps", "0", "--", "train.py"], "steps must be >= 1, got 0"),
        (["--until-phase", "evaluate:0", "--", "train.py"], "until-phase must be a phase, or one and its occurrence"),
        (["--until-phase", "", "--", "train.py"], "until-phase: '' given; name a value, or leave it out"),
        (["--until-phase", "save", "--steps", "auto", "--", "train.py"], "--until-phase and --steps auto exclude each"),
        (
            ["--phases", "train,,save", "--", "train.py"],
            "phases must be names, as in generate,train, got 'train,,save'",
        ),
        (["--", "-m"], "-m must be followed by a module"),
        (["--", "train.ipynb"], "'train.ipynb' is a notebook; make a script of it: jupyter nbconvert --to script"),
        (["--", "train.sh"], "'train.sh' is a shell script; give the command in it that starts the training"),
        (["--", "folder"], "'folder' is a folder; give the script in it, or -m and the package's name"),
        (["--gpus", "12", "--", "train.py"], "gpus"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    for name in ("train.py", "train.ipynb", "train.sh"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    status, err = status_of(["dryrun", "--cluster", "dgx-h100", *words], capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert says in err


def test_races_and_the_page_are_made_of_one_run(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(tmp_path, scripts.TRAIN, "--races", "--html", str(page), "--gpus", "2")
    assert done.returncode == 0, done.stderr
    assert "Races: none; all accesses to the same memory" in done.stdout
    assert f"page: {page}" in done.stdout
    text = page.read_text()
    assert "FITS: peak reserved " in text
    assert "Races" in text


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "print('ran')", "--trace", "missing/trace.json")
    assert done.returncode == 2
    assert "trace: missing/trace.json cannot be written (No such file or directory); name " in done.stderr
    assert "ran" not in done.stderr


def test_its_own_trace_prices_every_kernel(trained: tuple[dict[str, Any], str, Path]) -> None:
    alone, _, folder = trained
    trace, script = str(folder / "trace.json"), str(folder / "train.py")
    command = ["validate", "--prices", trace, "--cluster", "dgx-h100", "--json", "--", script]
    done = subprocess.run([sys.executable, "-m", "refshard", *command], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["share"] == 1.0
    assert found["matched"] == found["kernels"] > 20
    assert found["trace_step_s"] == pytest.approx(alone["step_s"])
    assert found["model_step_s"] == pytest.approx(alone["step_s"], rel=0.01)
    assert found["step_s"] == pytest.approx(alone["step_s"], rel=0.02)  # kernels beside others took longer there
    products, *_, every = found["kernel_times"]
    assert (products["class"], every["class"]) == ("GEMM", "all")
    assert products["with_prices"] == pytest.approx(products["trace"], rel=0.05)


def test_a_trace_of_one_size_prices_others(trained: tuple[dict[str, Any], str, Path], tmp_path: Path) -> None:
    *_, folder = trained
    done = run(tmp_path, scripts.TRAIN, "--prices", str(folder / "trace.json"), "--gpus", "4,16", "--json")
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout)["rows"]:
        assert 0.4 < row["measured"] < 1.0  # products are the same, shards are not


@pytest.mark.parametrize("gpus", ["16", "4,16"])
def test_a_trace_of_another_job_is_refused(
    trained: tuple[dict[str, Any], str, Path], tmp_path: Path, gpus: str
) -> None:
    *_, folder = trained
    larger = scripts.TRAIN.replace("1024", "2048")
    done = run(tmp_path, larger, "--prices", str(folder / "trace.json"), "--gpus", gpus)
    assert done.returncode == 2
    assert re.search(r"prices: the trace must be of the same job, got one with \d % of its compute time", done.stderr)


@pytest.mark.full
def test_errors_show_the_scripts_own_lines(tmp_path: Path) -> None:
    done = run(tmp_path, "def load():\n    raise ValueError('no data')\n\n\nload()\n")
    assert done.returncode == 1
    assert "FAILED: ValueError: no data\nat train.py:2 in load" in done.stdout
    assert "in load" in done.stderr
    assert "child.py" not in done.stderr


@pytest.mark.full
def test_an_exit_message_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys\n\nsys.exit('no such config')\n")
    assert "FAILED: the script ended with exit status 1: no such config" in done.stdout


def test_a_compiled_script_is_compared_with_itself_uncompiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run(tmp_path, scripts.COMPILED, "--compile", "both", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (again,) = found["answer"]["compiled"]["recompiled"]
    assert again["line"] == "train.py:13 in forward"
    assert "size mismatch at index 0. expected 8192, actual 4096" in again["reason"]
    assert found["against"]["answer"]["compiled"] is None
    eager, compiled = (one["answer"]["peak"]["allocated"] for one in (found["against"], found))
    assert eager - compiled == 8192 * 4096 * 4  # eager keeps what GELU makes; compiled code makes it again


_WIDTH = """
import sys
from collections import OrderedDict

import torch
from torch import nn

width = int(sys.argv[1])
parts = OrderedDict(up=nn.Linear(1024, width, bias=False), down=nn.Linear(width, 1024, bias=False))
model = nn.Sequential(parts).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2048, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_two_commands_are_compared_by_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WIDTH)
    command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--gpus", "1"]
    against = ["--against", "train.py 4096", "--", "train.py", "8192"]
    done = subprocess.run([*command, *against], capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    assert done.returncode == 0, done.stderr
    # Each weight has 1,024 x 4,096 fp32 numbers more, and so has its gradient; activations have 2,048 x 4,096.
    printed = " ".join(done.stdout.split())
    assert "At the peak of allocated memory: down +48.0 MiB, outside of modules +32.0 MiB, up +32.0 MiB." in printed
    assert re.search(r"\* Step time: \+.* ms \(\+\d+\.\d %\)\. Kernels: ", done.stdout)
    refused = subprocess.run(
        [*command, "--model", "llama3-8b", "--against", "train.py 4096"], capture_output=True, text=True, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "--against compares two scripts by one rank; leave out --model" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(("command", "why"), [("", "got none"), ("train.py '", "No closing quotation")])
def test_a_command_to_compare_with_must_be_one(command: str, why: str) -> None:
    with pytest.raises(SpecError, match=f"against must be a command, .*{why}"):
        words_of_text(command)


_ON_GPU = """
import os
import sys

import torch

os.environ.update(variable.split("=") for variable in sys.argv[2:])
gpus = [f"cuda:{number}" for number in sys.argv[1].split(",")]
print("sees", torch.cuda.device_count())
models = [torch.nn.Linear(4096, 4096, bias=False, device=gpu) for gpu in gpus]
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
for _ in range(3):
    for gpu, model in zip(gpus, models):
        model(torch.ones(64, 4096, device=gpu)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("variable", "arguments", "sees"),
    [(None, ["0"], 8), ("3", ["0"], 1), ("2,5", ["1"], 2), ("", ["0"], 8), (None, ["0", "CUDA_VISIBLE_DEVICES=6"], 1)],
)
def test_peaks_are_those_of_the_gpu_that_holds_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, arguments: list[str], sees: int
) -> None:
    """Of rank 3, which sees one GPU only or several, by the variable as it is set before the start or by the script."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    (tmp_path / "train.py").write_text(_ON_GPU)
    command = (str(tmp_path / "train.py"), *arguments)
    found = dry_run(Request(command=command, cluster="dgx-h100", world_size=8, local_ranks=8, rank=3), quiet=True)
    assert found.answer.outcome == "stepped"
    assert f"sees {sees}\n" in found.output
    # The weight and its gradient, cuBLAS's workspaces of two threads, input and output.
    assert found.answer.peak.allocated // MIB == 2 * 64 + 2 * 32 + 2
    assert found.answer.others == {}


def test_memory_on_several_gpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ON_GPU)
    command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--", "train.py", "1,3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    said = "The process uses 2 GPUs. Peaks are those of the one that holds most; reserved on others: GPU 3 "
    assert said in " ".join(done.stdout.split())


@pytest.mark.full
def test_compiling_can_be_switched_off(tmp_path: Path) -> None:
    done = run(tmp_path, scripts.COMPILED, "--compile", "no", "--json")
    assert json.loads(done.stdout)["answer"]["compiled"] is None


@pytest.mark.full
def test_compiled_blocks_need_what_they_needed_on_a_gpu() -> None:
    """The dry run of ``1b-fsdp2-compile`` beside one H200, under torch 2.11."""
    pytest.importorskip("triton")
    (case,) = (case for case in read_cases() if case.name == "1b-fsdp2-compile")
    launched = map(json.loads, (RECORDS / "cases-2.jsonl").read_text().splitlines())
    measured = next(row for row in launched if row["name"] == case.name)
    request = Request(
        command=(str(SCRIPT), "--out", os.devnull, *case.arguments), cluster="hgx-h200", world_size=1, local_ranks=8,
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    answer = dry_run(request).answer
    assert answer.outcome == "stepped", answer.error
    assert answer.peak.allocated == measured["peak"]["allocated"]
    assert answer.peak.reserved == pytest.approx(measured["peak"]["reserved"], rel=1e-3)


@pytest.mark.full
def test_a_trace_of_8_ranks_prices_64_as_one_h200_measured_them() -> None:
    """The trace shows backward of three of 32 blocks; 64 ranks ran over torch's fake process group, as the 8 did."""
    (case,) = (case for case in read_cases() if case.name == "8b-w64-full")
    rows = [json.loads(line) for n in (1, 2, 3) for line in (RECORDS / f"cases-{n}.jsonl").read_text().splitlines()]
    step_s = median(row["step_s"] for row in rows if row["name"] == case.name and "step_s" in row)
    request = Request(
        command=(str(SCRIPT), "--out", os.devnull, *case.arguments), cluster="hgx-h200x8", world_size=64, local_ranks=8,
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    cluster = of_fake_backend(load_cluster("hgx-h200x8"))
    trace = read_measured(Path("tests/analysis/h200/fake_rank0of8.json.gz"))
    found = analyse(dry_run(request, quiet=True), cluster, measured=trace)
    assert found.coverage is not None
    assert 0.8 < found.coverage.share < 0.95
    assert found.step_s == pytest.approx(step_s, rel=0.05)
