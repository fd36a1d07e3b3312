"""Peers that need packages which few have: each where it is installed, and what is said where it is not.

Two gloo ranks in one launch a package; the YaFSDP adapter also over a stand-in for its package.
"""

import re
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from refshard.errors import UnsupportedError
from refshard.measure.trainer import Trainer
from refshard.records import parity_tolerance
from refshard.specs.case import Case
from refshard.specs.job import OPTIONS
from refshard.strategies import make_strategy, strategy_for
from refshard.strategies.base import Strategy
from refshard.strategies.deepspeed_zero import DeepSpeedZero
from refshard.strategies.table import OWN_MODEL, ROWS
from refshard.strategies.yafsdp import YaFSDP
from tests.distributed.ranks import run_ranks
from tests.models import small_spec
from tests.strategies.test_strategies import observe

pytestmark = pytest.mark.full

FAKE = "tests.strategies.fake_ya_fsdp"
OPTIONAL = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3", "megatron-fsdp", "yafsdp")
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inference": {"workload": "inference"},
    "accumulated": {"microbatches": 2},
    "both": {"microbatches": 4, "checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "some": {"checkpointing": (0, 2)},
    "lora": {"tuning": "lora"},
    "lora both": {"tuning": "lora", "microbatches": 2, "checkpointing": "full"},
    "lora inference": {"tuning": "lora", "workload": "inference"},
    "bf16": {"precision": "bf16"},
    "bf16 both": {"precision": "bf16", "microbatches": 2, "checkpointing": "full"},
    "bf16 inference": {"precision": "bf16", "workload": "inference"},
    "bf16 lora": {"precision": "bf16", "tuning": "lora"},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "": {},
    "cut": {"stage3_param_persistence_threshold": 0},
    "mixed": {"stage3_param_persistence_threshold": 6000, "stage3_prefetch_bucket_size": 12_000},
    "buckets": {"reduce_bucket_size": 20_000},
    "small": {"reduce_bucket_size": 1_000},
    "few": {"stage3_max_live_parameters": 10_000},
}
"""Other entries of DeepSpeed's configuration: a small model's parameters are all under its threshold."""
REFERENCES = ("plain", "inference", "lora", "lora inference")
"""Scenarios whose losses the others' equal."""
Key = tuple[str, str, str, bool]
Results = dict[Key, dict[str, Any]]


def case_of(name: str, scenario: str) -> Case:
    """Eight sequences a step, whatever the number of ranks."""
    ranks = 1 if name == "single" else 2
    fields = {"gpus": ranks, "global_batch": 8, "seq_len": 8, "learning_rate": 1e-2, **SCENARIOS[scenario]}
    return Case.of(strategy=name, model="small", **fields)


def make(name: str, arguments: str) -> Strategy:
    """``arguments`` of DeepSpeed by name; of YaFSDP, the module that stands in for it."""
    if name.startswith("deepspeed"):
        return DeepSpeedZero(**ROWS[name].arguments, **ARGUMENTS[arguments])
    return YaFSDP(arguments) if name == "yafsdp" and arguments else make_strategy(name)


def train(key: Key) -> dict[str, Any]:
    name, scenario, arguments, tied = key
    return observe(make(name, arguments), case_of(name, scenario), small_spec(tied=tied))


def train_all(wanted: list[Key]) -> Results:
    return {key: train(key) for key in wanted}


def cells() -> list[Key]:
    """What the rows claim to do, but for what has a test of its own."""
    found: list[Key] = []
    for name in OPTIONAL:
        scenarios = [s for s in SCENARIOS if not ROWS[name].lacks(case_of(name, s))]
        if name.startswith("deepspeed"):
            found += [(name, s, "", False) for s in scenarios if (name, s) != ("deepspeed-zero3", "lora both")]
            found += [(name, s, "", True) for s in ("plain", "both", "inference")]
            found.append((name, "accumulated", "buckets", False))
        if name == "deepspeed-zero3":
            found += [(name, s, "cut", False) for s in ("plain", "both", "inference", "lora", "lora inference")]
            found += [(name, s, "mixed", False) for s in ("plain", "both", "inference", "lora")]
            found.append((name, "plain", "cut", True))
        if name == "yafsdp":
            found += [(name, s, "", False) for s in scenarios]
            found += [(name, s, FAKE, False) for s in ("plain", "inference", "both", "lora", "bf16 both")]
    return found


CELLS = cells()


def package_of(cell: Key) -> str:
    """The package that a cell cannot run without; none for a stand-in."""
    return "" if cell[2] == FAKE else ROWS[cell[0]].packages[0]


def trained_with(package: str) -> Results:
    """Cells that need this package, and what they are held against; each with the mean loss over its ranks."""
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/reference/peers.md")
    wanted = [cell for cell in CELLS if package_of(cell) == package]
    pairs = {(scenario, tied) for _, scenario, _, tied in wanted}
    found: Results = {}
    alone: list[Key] = [("single", s, "", t) for s, t in sorted(pairs) if s in REFERENCES]
    for ranks_, cells_ in ((1, alone), (2, wanted + [("fsdp2", s, "", tied) for s, tied in sorted(pairs)])):
        ranks = run_ranks(ranks_, train_all, cells_)
        for key, result in ranks[0].items():
            losses = [sum(step) / ranks_ for step in zip(*(rank[key]["losses"] for rank in ranks))]
            found[key] = {**result, "losses": losses}
            assert [rank[key]["counted"] for rank in ranks] == [result["counted"]] * ranks_
    return found


@pytest.fixture(scope="module")
def with_deepspeed() -> Results:
    return trained_with("deepspeed")


@pytest.fixture(scope="module")
def with_ya_fsdp() -> Results:
    return trained_with("ya_fsdp")


@pytest.fixture(scope="module")
def with_stand_in() -> Results:
    return trained_with("")


@pytest.fixture
def trained(request: pytest.FixtureRequest, cell: Key) -> Results:
    """All cells of the package that ``cell`` needs; skipped where that is not installed."""
    found: Results = request.getfixturevalue(f"with_{package_of(cell) or 'stand_in'}")
    return found


def of_cell(cell: Key) -> str:
    name, scenario, arguments, tied = cell
    return ", ".join(filter(None, (name, scenario, arguments.rpartition(".")[2], "tied" if tied else "")))


every_cell = pytest.mark.parametrize("cell", CELLS, ids=of_cell)


@every_cell
def test_announced_collectives_are_those_at_the_dispatcher(trained: Results, cell: Key) -> None:
    if cell[2] == FAKE and "lora" in cell[1] and "inference" not in cell[1]:
        pytest.skip("the stand-in reduces what is trained, YaFSDP whole units")
    result = trained[cell]
    assert result["announced"] == result["counted"]
    gathers_nothing = cell[0] != "yafsdp" and "inference" in cell[1] and cell[2] not in ("cut", "mixed")
    assert bool(result["counted"]) != gathers_nothing


@every_cell
def test_losses_equal_those_of_one_unsharded_rank(trained: Results, cell: Key) -> None:
    case = case_of(cell[0], cell[1])
    like = " ".join(
        filter(
            None, ("lora" if case.job.tuning == "lora" else "", "inference" if case.job.workload == "inference" else "")
        )
    )
    reference = trained["single", like or "plain", "", cell[3]]["losses"]
    assert trained[cell]["losses"] == pytest.approx(reference, rel=parity_tolerance(case))
    assert case.job.workload == "inference" or reference[-1] < reference[0]


@every_cell
def test_parameters_are_close_to_fsdp2s(trained: Results, cell: Key) -> None:
    ours, theirs = (trained[key]["parameters"] for key in (cell, ("fsdp2", cell[1], "", cell[3])))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


@every_cell
def test_units_are_found_on_the_model(trained: Results, cell: Key) -> None:
    name, scenario, _, tied = cell
    blocks = {f"model.layers.{i}" for i in range(3)}
    if name == "yafsdp":
        assert set(trained[cell]["units"]) == blocks | {"model.embed_tokens", "model.norm+lm_head"}
        return
    parameters = set(trained[cell]["parameters"])
    adapters = {p for p in parameters if ".lora_" in p}
    assert ("lm_head.weight" in parameters) != tied
    assert set(trained[cell]["units"]) == (adapters if "lora" in scenario and name != "deepspeed-zero3" else parameters)


def test_the_page_of_peers_has_every_row() -> None:
    """A first cell has a name or a pattern, and then more endings of its first word."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "peers.md").read_text()
    patterns = set()
    for cell in re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE):
        first, *endings = re.findall(r"`([^`]+)`", cell)
        patterns |= {first, *(f"{first.partition('-')[0]}*{ending}" for ending in endings)}
    assert [name for name in ROWS if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_axes_of_the_rows() -> None:
    zero = {"inference", "microbatches", "checkpointing", "lora"}
    assert [ROWS[f"deepspeed-zero{stage}"].axes for stage in (1, 2, 3)] == [zero] * 3
    assert ROWS["yafsdp"].axes == zero | {"bf16"}
    assert ROWS["megatron-fsdp"].axes == {"microbatches", "checkpointing", "bf16"}


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_its_package_a_case_is_unsupported_and_says_how_to_install_it(name: str) -> None:
    package = ROWS[name].packages[0]
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    extra = ROWS[name].extra
    remedy = (
        f"pip install -e '.[{extra}]' in refshard's checkout" if extra else "it is not on PyPI: install it from source"
    )
    with pytest.raises(UnsupportedError) as caught:
        strategy_for(case_of(name, "plain"), cuda=True)
    assert str(caught.value) == f"{name} needs {package}, which is not installed; {remedy}"


def test_without_cuda_megatron_is_unsupported_in_its_own_words() -> None:
    with pytest.raises(UnsupportedError) as caught:
        strategy_for(case_of("megatron-fsdp", "plain"), cuda=False)
    words = "needs a CUDA device; without one it says: AssertionError: Torch not compiled with CUDA enabled"
    assert str(caught.value) == f"megatron-fsdp {words}"


def refused(case: Case, arguments: str, tied: bool = False) -> str:
    """What a real attempt to wrap says."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(UnsupportedError) as caught:
        Trainer(case, small_spec(tied=tied), make(case.job.strategy, arguments), group, torch.device("cpu"))
    return str(caught.value)


@pytest.mark.skipif(find_spec("megatron_fsdp") is None, reason="needs megatron_fsdp (docs/reference/peers.md)")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is compiled with CUDA")
def test_a_real_attempt_at_megatron_says_what_the_table_quotes() -> None:
    said = run_ranks(2, refused, case_of("megatron-fsdp", "plain"), "")
    assert said == [f"Megatron-FSDP on cpu: {ROWS['megatron-fsdp'].without_cuda}"] * 2


def test_yafsdp_refuses_a_tied_model_in_its_own_words() -> None:
    words = "Param groups of model.layers.0 and model.embed_tokens share a grad buffer, so they can't be unsharded at"
    assert all(words in said for said in run_ranks(2, refused, case_of("yafsdp", "plain"), FAKE, True))


def test_deepspeed_refuses_what_it_cannot_announce_and_ranks_that_are_not_there() -> None:
    lora = case_of("deepspeed-zero3", "lora both")
    emulated = {"fidelity": "emulated", "cluster": "dgx-h100"}
    absent = case_of("deepspeed-zero1", "plain").changed(**emulated)
    for case, reason in ((lora, "has no closed form"), (absent, "of real ranks only")):
        assert all(reason in said for said in run_ranks(2, refused, case, ""))


@pytest.mark.parametrize(
    ("ranks", "arguments", "reason"),
    [
        (2, "small", "within reduce_bucket_size = 1,000 elements, and its largest parameter has 16,384;"),
        (2, "few", "within stage3_max_live_parameters = 10,000 elements, and all its parameters have 137,664;"),
        (1, "", "ZeRO over a single rank shards nothing"),
    ],
)
def test_deepspeed_refuses_before_it_trains_what_could_not_be_proved(ranks: int, arguments: str, reason: str) -> None:
    case = case_of("deepspeed-zero3", "plain").changed(gpus=ranks)
    assert all(reason in said for said in run_ranks(ranks, refused, case, arguments))


def test_rows_name_options_that_jobs_have() -> None:
    known = {*OPTIONS, OWN_MODEL}
    assert {axis for row in ROWS.values() for axis in (*row.axes, *row.why_not)} <= known
    assert known <= {axis for row in ROWS.values() for axis in row.axes}
