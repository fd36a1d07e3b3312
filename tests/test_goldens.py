"""Reports as files in ``tests/goldens``: what a command prints, with details, and its JSON.

``pytest tests/test_goldens.py --accept`` rewrites the files; the diff is the review. In JSON, numbers have six digits
and long lists only their first elements, so that a file stays readable.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from refshard.analysis.evidence import gather
from refshard.analysis.exact import Change
from refshard.analysis.gate import Effect, TimeVerdict
from refshard.analysis.rehearsal import CaseNoise, Noise
from refshard.cli import app
from refshard.commands.doctor import report
from refshard.dryrun.price import Doubt
from refshard.dryrun.request import Choice, Pool
from refshard.records import GpuSettings, GpuUse, Run
from refshard.report import forms
from refshard.report.blocks import Answer
from refshard.report.calibration import profile_answer
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.gate.formats import GateCase, GateReport, gate_answer, noise_answer
from refshard.report.page import as_page
from refshard.report.run.answer import run_answer
from refshard.report.run.compare import compare_runs
from refshard.report.run.page import Extras, index_answer, page
from refshard.specs.cluster import load_cluster
from refshard.specs.suite import NetworkSpec
from tests.measure.doctor.machines import SHARED
from tests.report import runs as made_runs
from tests.report.dryruns import analysed, doubtful
from tests.report.pages import Page
from tests.report.trace import scenarios

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GOLDENS = Path(__file__).parent / "goldens"
RECORDED = "profiles/recorded"
_TRACES = f"{RECORDED}/xeon-2-cores/engine_network/traces"
_FSDP2, _YAFSDP = (f"{_TRACES}/{name}-w2-llama-mini-b2x512-{hash_}-round0-rank0.json.gz" for name, hash_ in (
    ("fsdp2-tuned", "c87206252dae"), ("refshard-yafsdp", "2e35b2348268"),
))  # fmt: skip

COMMANDS = {
    "trace-ddp-h200": "trace tests/analysis/h200/ddp.json.gz",
    "trace-emulated-h200": "trace tests/analysis/h200/emulated_fsdp2.json.gz",
    "trace-fake-group-h200": "trace tests/analysis/h200/fake_rank0of8.json.gz",
    "trace-two-ranks": "trace tests/analysis/others/hta_sampled_128rank_r0.json.gz "
    "tests/analysis/others/hta_sampled_128rank_r1.json.gz",
    "trace-sync-events": "trace tests/analysis/others/hta_cuda_event_sync_multi_stream.json.gz",
    "trace-cpu-only": "trace tests/analysis/others/hta_cpu_only_gloo.json.gz",
    "trace-cpu-fsdp2": f"trace {_FSDP2}",
    "trace-against": f"trace {_FSDP2} --against {_YAFSDP}",
    "show-quickstart": f"show {RECORDED}/epyc-2-cores/quickstart",
    "show-engine": f"show {RECORDED}/xeon-2-cores/engine",
    "show-when-to-shard": f"show {RECORDED}/xeon-2-cores/when_to_shard",
    "show-finetune": f"show {RECORDED}/epyc-2-cores/finetune",
    "show-h200": f"show {RECORDED}/h200/suite",
    "show-dry-runs": f"show {RECORDED}/dryrun/llama3_8b_h100",
    "compare-strategies": f"compare ddp --run {RECORDED}/epyc-2-cores/quickstart",
    "compare-runs": f"compare {RECORDED}/epyc-2-cores/quickstart {RECORDED}/epyc-2-cores/quickstart",
    "compare-machines": f"compare {RECORDED}/xeon-2-cores/engine {RECORDED}/xeon-2-cores/engine_network",
    "history": f"history {RECORDED}/epyc-2-cores",
    "validate-network": f"validate {RECORDED}/xeon-2-cores/validation_network",
    "plan-70b": "plan --model llama3-70b --cluster dgx-h100 --gpus 256 --tokens-per-step 4M",
    "plan-does-not-fit": "plan --model llama3.1-405b --cluster dgx-h100 --tokens-per-step 1M",
    "plan-sizes": "plan --model llama3-8b --cluster dgx-h100 --gpus 8..32 --tokens-per-step 1M",
    "plan-variants": "plan --model llama3-8b --cluster dgx-h100x2 --tokens-per-step 1M --strategy fsdp2,megatron "
    "--precision bf16,fp8 --compile both --tp 1,2",
    "plan-experts": "plan --model qwen3-30b-a3b --cluster dgx-h100x4 --tokens-per-step 1M --search --dry-runs 0",
    "list-strategies": "list strategies",
    "list-models": "list models",
    "list-clusters": "list clusters",
    "list-hardware": "list hardware",
    "list-modes": "list modes",
}
PAGES = {
    "page-quickstart": "epyc-2-cores/quickstart",
    "page-network": "xeon-2-cores/engine_network",
    "page-dry-runs": "dryrun/llama3_8b_h100",
}


def _dry(name: str) -> Answer:
    """A dry run made by hand."""
    found = analysed()
    if name == "dryrun-uncertain":
        found = doubtful(found, Doubt(name="mylib::scale", reason="no bytes are known", count=6, seconds=0.002))
    elif name == "dryrun-does-not-fit":
        error = "CUDA out of memory. Tried to allocate 2.00 GiB. Including what torch adds"
        refused = msgspec.structs.replace(found.run.answer, outcome="oom", error=error, where="train.py:12 in forward")
        found = replace(found, run=replace(found.run, refused=refused))
    elif name == "dryrun-failed":
        found = analysed(outcome="failed", error="ValueError: no such file", where="train.py:3 in <module>")
    elif name == "dryrun-routed":
        choices = tuple(
            Choice(operator="aten::topk", module=f"layers.{layer}.moe.router", count=8, among=128, times=2)
            for layer in range(2)
        )
        found = analysed(choices=choices, chosen_sizes=True, expert_rank=(0, 8))
        answer = found.run.answer
        worst = msgspec.structs.replace(answer, peak=Pool(allocated=2**37, active=2**37, reserved=2**37, requested=0))
        found = replace(found, run=replace(found.run, by_routing={"balanced": answer, "worst": worst}))
    return dryrun_answer(found)


def _gate(name: str) -> Answer:
    """A gate made by hand, its machine's noise, a calibrated profile, and a doctor's answer."""
    case = CaseNoise(
        ratio=1.002, low=0.99, high=1.01, spread=0.021, smallest_visible=0.035, found=3, tried=4, planted=0.05,
        false_alarms=2, inconclusive=10, rounds=16,
    )  # fmt: skip
    noise = Noise(gates=2000, launches=160, failing_gates=30, cases={"ddp-w2": case})
    if name == "gate-noise":
        return noise_answer(noise, Path("noise.json"))
    if name == "doctor":
        return report(SHARED)
    if name == "calibrate":
        return profile_answer(load_cluster(str(ROOT / RECORDED / "h200/calibration.toml")), "kept: x.toml")
    effect = Effect(ratio=1.04, low=1.03, high=1.05, p_slower=0.001, p_faster=0.9, spread=0.02, rounds=16)
    slower = TimeVerdict(verdict="regressed", effect=effect, smallest_visible=0.035, suspect=True)
    even = replace(slower, verdict="pass", effect=replace(effect, ratio=1.0), suspect=False)
    change = Change(case="fsdp2-w2", metric="all_gather bytes", before=40960, after=81920, verdict="regressed")
    cases = (
        GateCase(name="ddp-w2", time=slower),
        GateCase(name="fsdp2-w2", changes=(change,), time=even, remark="its peak rose in one of two launches"),
        GateCase(name="yafsdp-w2", trouble="the candidate ended in state oom: out of memory"),
    )
    return gate_answer(GateReport(baseline="v1", candidate=".", cases=cases, notes=("paired",), noise=noise))


def _made(name: str) -> Answer:
    """Runs made by hand: one with a failure, one on GPUs over a network, one compared with an earlier one."""
    if name == "run-made":
        return run_answer(gather(made_runs.run()))
    on_gpus = _on_gpus()
    if name == "run-on-gpus":
        return run_answer(gather(on_gpus))
    slower = made_runs.quicker(made_runs.run(), 1.1)
    slower = made_runs.with_record(slower, 1, state="oom", error="too large")
    slower = made_runs.with_record(slower, 2, losses=(1.0, 2.0))
    return compare_runs(gather(made_runs.run()), gather(made_runs.later(slower, "now")), ["cpu: A is x, B is y"])


def _on_gpus() -> Run:
    """Every figure that only GPUs have, and an overlap efficiency."""
    memory = made_runs.gpu_memory(30.0), made_runs.gpu_memory(71.2, retries=2)
    found = made_runs.with_load(made_runs.on_gpus(made_runs.run(failed=False), *memory), {})
    for gpu in range(2):
        uses = tuple(
            GpuUse(gpu=n, samples=10, power_w=550.0 + 100 * n, max_power_w=700.0, sm_clock_mhz=1700.0,
                   min_sm_clock_mhz=1200 - 100 * n, throttled={"power cap": 5} if n else {})
            for n in range(gpu + 1)
        )  # fmt: skip
        found = made_runs.with_record(found, 1 + gpu, gpu_use=uses)
    settings = tuple(GpuSettings(power_limit_w=watts, ecc=True, nvlinks={"switch": 18}) for watts in (700.0, 500.0))
    found = made_runs.on_hosts(found, NetworkSpec(hosts=2, rate="8gbit"))
    return made_runs.later(
        found, "now", gpus=("H100", "H100"), gpu_memory_bytes=(2**36, 2**36), gpu_driver="570.86.15", cuda="12.8",
        gpu_settings=settings, tf32=True, variables={"NCCL_ALGO": "Ring"}, gpu_throttled=((), ("power cap",)),
    )  # fmt: skip


def _pages(name: str) -> str:
    """The page of a run on GPUs beside an earlier one, and the index of both."""
    before, now = gather(made_runs.run()), gather(_on_gpus())
    if name == "page-made":
        return _read("".join(page(now, Extras(baseline=before))))
    index = index_answer({"before.html": before, "now.html": now})
    return _read("".join(as_page(index, product="report", command="refshard report before now")))


RUNS = ("run-made", "run-on-gpus", "compare-changed")
GATES = ("gate", "gate-noise", "calibrate", "doctor")
DRY_RUNS = ("dryrun", "dryrun-uncertain", "dryrun-does-not-fit", "dryrun-failed", "dryrun-routed")


def _command(words: str, *options: str) -> str:
    made = CliRunner().invoke(app, [*words.split(), *options], catch_exceptions=False)
    return made.stdout


def _printed(made: Callable[[str], Answer], name: str) -> str:
    return forms.as_text(made(name), forms.Paper(), verbose=True)


def _page(folder: str) -> str:
    """The text of a run's page, a line for each row of a table, comparisons that wait in templates included."""
    with TemporaryDirectory() as out:
        path = Path(out) / "page.html"
        _command(f"report {RECORDED}/{folder} --out {path}")
        return _read(path.read_text(encoding="utf-8"))


def _read(html: str) -> str:
    html = re.sub(r"(?s)<t[hd]\b.*?</t[hd]>", lambda cell: " ".join(cell[0].split()), html)
    rows = re.sub(r"</(t[hd]|dt|dd)>\s*(?=<(t[hd]|dd))", " | ", html)
    lines = (" ".join(line.split()) for line in Page(rows).text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def _outputs() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {}
    for name, words in COMMANDS.items():
        found[f"{name}.txt"] = partial(_command, words, "-v")
        found[f"{name}.json"] = partial(lambda words: _readable(_command(words, "--json")), words)
    for name in (*DRY_RUNS, *GATES, *RUNS):
        made, command = (_gate, "gate") if name in GATES else (_made, "show") if name in RUNS else (_dry, "dryrun")
        found[f"{name}.txt"] = partial(_printed, made, name)
        found[f"{name}.json"] = partial(
            lambda made, name, command: _readable(forms.as_json(made(name), command)), made, name, command
        )
    found |= {f"{name}.txt": partial(_pages, name) for name in ("page-made", "page-index")}
    found |= {
        "trace-findings.txt": scenarios.findings_text, "trace-sections.txt": scenarios.sections_text,
        "trace-lanes.txt": scenarios.lanes_text, "trace-snapshots.txt": scenarios.snapshot_text,
        "trace-differences.txt": scenarios.differences_text,
    }  # fmt: skip
    return found | {f"{name}.txt": partial(_page, folder) for name, folder in PAGES.items()}


OUTPUTS = _outputs()


def _readable(text: str) -> str:
    return json.dumps(_short(json.loads(text)), indent=1) + "\n"


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        kept = [_short(one) for one in value[:_MOST]]
        return (
            [*kept, f"... {len(value)} in all"] if len(value) > _MOST and isinstance(value[0], (dict, list)) else kept
        )
    return float(f"{value:.6g}") if isinstance(value, float) else value


_MOST = 3


@pytest.mark.parametrize("name", OUTPUTS)
def test_report_is_as_accepted(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path, printed = GOLDENS / name, OUTPUTS[name]()
    if request.config.getoption("accept"):
        gone = (
            _gone(json.loads(path.read_text()), json.loads(printed)) if path.suffix == ".json" and path.exists() else []
        )
        assert not gone, f"{gone} went: raise SCHEMA_VERSION"
        path.write_text(printed)
    assert path.exists(), f"{path} is missing; pytest tests/test_goldens.py --accept writes it"
    assert printed == path.read_text(), f"changed; if on purpose: pytest tests/test_goldens.py -k '{name}' --accept"


def _gone(before: Any, now: Any) -> list[str]:
    """Keys of JSON that are no longer there although its version is the same."""
    if before["schema_version"] != now["schema_version"]:
        return []
    return sorted(_keys(before) - _keys(now))


def _keys(value: Any) -> set[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(_keys, inner))


def test_a_key_that_went_needs_a_new_version() -> None:
    before = {"schema_version": 2, "rows": [{"a": 1, "b": 2}]}
    assert _gone(before, {"schema_version": 2, "rows": [{"a": 1}]}) == ["b"]
    assert not _gone(before, {"schema_version": 3, "rows": [{"a": 1}]})


def test_every_golden_has_its_command() -> None:
    assert {path.name for path in GOLDENS.iterdir()} == set(OUTPUTS)
