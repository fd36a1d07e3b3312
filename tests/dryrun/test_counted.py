"""Modules that are planned by their operators: counts known by hand, and plans held to dry runs of the same module.

``counted.json`` holds what dry runs of the factories in ``counted_models.py`` came to, under three strategies on one
DGX H100: allocated bytes and seconds of a step, without the host's Python. ``make full`` repeats them; ``pytest
tests/dryrun/test_counted.py --accept`` rewrites it. cuBLAS's workspaces are switched off in the dry runs.
"""

import json
from functools import cache
from itertools import product
from pathlib import Path

import msgspec
import pytest

from refshard.dryrun.counted import count_model
from refshard.errors import SpecError
from refshard.measure.dry.many import dry_run_many
from refshard.models.dimensions import read_dimensions
from refshard.plan.estimate import estimate
from refshard.plan.space import Candidates
from refshard.specs.case import Case, Protocol
from refshard.specs.cluster import load_cluster
from refshard.specs.counted import AnyModel, CountedModel
from refshard.specs.job import Job
from tests.dryrun.counted_small import BLOCKS, DIM, INNER, VOCAB
from tests.fakecuda.needs import needs_device

RECORDED = Path(__file__).with_name("counted.json")
CLUSTER = load_cluster("dgx-h100x1")
SHAPES = {"vit": (1, 64), "bert": (512, 16), "neox": (2048, 2), "llama": (4096, 1)}
"""Tokens of a sequence, and sequences of a microbatch; a ViT's token is an image."""
CELLS = [*product(SHAPES, ("fsdp2", "ddp", "refshard-fsdp"), ("none", "full"))]
MEMORY, SUMS, TIME, BY_UNIT = 0.015, 0.07, 0.06, 0.10
"""Errors: of memory; of a ViT's, since torch's sums over many rows (gradients of biases) take workspaces that nobody
sees on the meta device, 98 to 132 MiB here; of a step's time; and of FSDP2's for blocks of 200 M parameters, as closed
forms of its copies have for any model."""


@cache
def counted(name: str) -> CountedModel:
    factory = f"tests.dryrun.counted_models:{name}"
    return count_model(factory, SHAPES[name][0], ["bf16", "autocast bf16"], CLUSTER.accelerator)


def job_of(name: str, strategy: str, checkpointing: str) -> Job:
    seq_len, microbatch = SHAPES[name]
    return Job(
        strategy=strategy, model=f"tests.dryrun.counted_models:{name}", gpus=8, cluster="dgx-h100x1", seq_len=seq_len,
        global_batch=8 * microbatch, microbatches=1, checkpointing=checkpointing, precision="bf16",
    )  # fmt: skip


def planned(model: AnyModel, job: Job) -> tuple[float, float]:
    """Bytes and seconds."""
    found = estimate(model, CLUSTER, job.seq_len, Candidates.of([job]))
    return float(found.memory.peak[0]), float(found.step_s[0])


class Recorded(msgspec.Struct):
    """What a dry run came to: bytes, and seconds of a step."""

    allocated: int
    step_s: float


@cache
def recorded() -> dict[str, Recorded]:
    return msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, Recorded])


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_plan_by_operators_agrees_with_dry_runs_of_the_module(cell: tuple[str, str, str]) -> None:
    pytest.importorskip("transformers")
    name, strategy, _ = cell
    memory, step_s = planned(counted(name), job_of(*cell))
    one = recorded()["-".join(cell)]
    assert memory == pytest.approx(one.allocated, rel=SUMS if name == "vit" else MEMORY)
    assert step_s == pytest.approx(one.step_s, rel=BY_UNIT if (name, strategy) == ("neox", "fsdp2") else TIME)


@needs_device
@pytest.mark.full
def test_dry_runs_are_as_recorded(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("transformers")
    cases = [Case(job=job_of(*cell), protocol=Protocol(fidelity="dryrun")) for cell in CELLS]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    found = dry_run_many(cases, tmp_path / "runs", lambda _: None, time_limit_s=3600, environment=environment)
    made = {}
    for cell, (one,) in zip(CELLS, found, strict=True):
        assert (one.state, one.error) == ("ok", None), cell
        made["-".join(cell)] = Recorded(one.peak.allocated, max(step.step_s for step in one.steps))
    if request.config.getoption("accept"):
        lines = (f"{json.dumps(name)}: {msgspec.json.encode(one).decode()}" for name, one in made.items())
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert {name: one.allocated for name, one in made.items()} == {n: recorded()[n].allocated for n in made}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "ddp", "refshard-zero1", "refshard-yafsdp"])
def test_a_llama_is_planned_alike_by_operators_and_by_dimensions(strategy: str, checkpointing: str) -> None:
    """Transformers' norms keep more than torch's, so that memory differs by as much in dry runs."""
    pytest.importorskip("transformers")
    job = job_of("llama", strategy, checkpointing)
    memory, step_s = planned(counted("llama"), job)
    expected = planned(read_dimensions(job.model), job)
    assert memory == pytest.approx(expected[0], rel=0.055)
    assert step_s == pytest.approx(expected[1], rel=0.05)


def small(name: str = "build", *variants: str) -> CountedModel:
    return count_model(f"tests.dryrun.counted_small:{name}", 32, variants or ["bf16"], CLUSTER.accelerator)


@pytest.mark.parametrize("sequences", [1, 2, 7])
@pytest.mark.parametrize("casts", [False, True])
def test_operators_and_bytes_of_a_block_are_those_known_by_hand(sequences: int, casts: bool) -> None:
    """Forward keeps the input of both products in bf16. The input of the block, which checkpointing keeps, is fp32 if
    autocast casts.
    """
    model, tokens = small("build", "bf16", "autocast bf16"), sequences * 32
    counts = model.of(sequences, "bf16", casts=casts)
    (block,) = counts.blocks
    assert block.number == model.n_layers == BLOCKS
    each = 2.0 * tokens * DIM * INNER
    assert [one.flops for one in block.forward.operators if one.kind == "product"] == pytest.approx([each, each])
    assert [one.flops for one in block.backward.operators if one.kind == "product"] == pytest.approx([each] * 4)
    assert [one.flops for one in block.again.operators if one.kind == "product"] == pytest.approx([each])
    assert counts.kept == pytest.approx(tokens * (2 * DIM + 2 * INNER))
    assert counts.given == pytest.approx(tokens * (4 if casts else 2) * DIM)
    # The result of log_softmax, its gradient and that of the logits; autocast casts for the loss, and the head's input.
    at_loss = tokens * (10 * VOCAB - 2 * DIM if casts else 6 * VOCAB)
    assert max(one.nbytes for one in counts.loss) == pytest.approx(at_loss, abs=16)


def test_elements_are_those_of_the_parts() -> None:
    model = small()
    assert (model.params, model.embedding, model.head, model.largest, model.casts) == (
        2 * VOCAB * DIM + BLOCKS * 2 * DIM * INNER, VOCAB * DIM, VOCAB * DIM, 2 * DIM * INNER, 0,
    )  # fmt: skip
    assert small("build", "autocast bf16").casts == VOCAB * DIM + BLOCKS * 2 * DIM * INNER
    assert model.flops_per_token == 6 * (model.params - model.embedding)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unlike", "must run the same operators for batches of 2 and 3 sequences, got others; dry-run it instead"),
        ("without_blocks", r"must have blocks, got no nn\.ModuleList; name them as the factory's third result"),
        ("asking", r"its module must run on the meta device, got RuntimeError: Tensor\.item\(\) cannot be called"),
    ],
)
def test_a_module_that_cannot_be_counted_is_refused(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        small(name)
