"""Mixtures of experts: held to dry runs of real code, and to what is true of any."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.costs import collective_cost
from refshard.plan.collectives import group_of
from refshard.plan.estimate import estimate
from refshard.plan.kernels import Share, feed_forward_linears, product_of
from refshard.quantities import GIB
from refshard.specs.cluster import load_cluster
from refshard.specs.model import (
    Experts,
    LatentAttention,
    ModelSpec,
    active_parameter_count,
    load_model,
    parameter_count,
)
from tests.fakecuda.needs import needs_device
from tests.plan.made import columns, estimated, job
from tests.plan.test_layers import costs, instant, made

ROOT = Path(__file__).parents[2]
DEEPSEEK_16B = ModelSpec(
    dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, ffn_dim=10944, vocab=102400, norm_eps=1e-6, rope_theta=1e4,
    tied=False, params=1, source="torchtitan's DeepSeek-V3 16B",
    experts=Experts(count=64, active=6, ffn_dim=1408, shared_ffn_dim=2816, dense_layers=1),
    latent=LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip
MODELS = {"qwen3": load_model("qwen3-30b-a3b"), "deepseek": DEEPSEEK_16B}
DRY_RUNS = [
    # refshard dryrun --cluster dgx-h100xN --gpus N -- docs/examples/train_moe.py --layers .. --batch .. --seq-len ..
    ("qwen3", 48, {"dp_shard": 8}, "full", 64_554_633_216),
    ("qwen3", 4, {"dp_shard": 8}, "full", 12.62 * GIB),
    ("qwen3", 8, {"dp_shard": 8, "microbatch": 2}, "full", 23.28 * GIB),
    ("qwen3", 8, {"dp_shard": 64}, "full", 9.32 * GIB),
    ("qwen3", 12, {"dp_shard": 16, "seq_len": 8192}, "full", 21.23 * GIB),
    # The same of validation/script/train.py, with the options of deepseek-v3-16b-batch4-ep8-h100x8-2025-10 but
    # --attention=efficient and no compilation.
    ("deepseek", 9, {"dp_shard": 8, "microbatch": 2, "strategy": "fsdp2-tuned"}, "none", 30.80 * GIB),
    ("deepseek", 9, {"dp_shard": 16, "microbatch": 4, "strategy": "fsdp2-tuned"}, "full", 23.51 * GIB),
]
"""Model, layers, sizes (8 ranks divide the experts), checkpointing, and the peak of allocated bytes of a dry run."""


@pytest.mark.parametrize(("name", "layers", "sizes", "policy", "peak"), DRY_RUNS)
def test_memory_is_that_of_dry_runs(name: str, layers: int, sizes: dict[str, int], policy: str, peak: float) -> None:
    model = msgspec.structs.replace(MODELS[name], n_layers=layers)
    model = msgspec.structs.replace(model, params=parameter_count(model))
    one = job(**{"model": name, "seq_len": 4096, "ep": 8, "checkpointing": policy, **sizes})
    found = estimate(model, load_cluster(f"dgx-h100x{one.gpus // 8}"), one.seq_len, columns(one)).memory.peak[0]
    assert found == pytest.approx(peak, rel=0.03)


@pytest.mark.slow
@pytest.mark.processes
@needs_device
def test_the_dry_runs_memory_and_all_to_alls_are_still_the_same() -> None:
    script = ["docs/examples/train_moe.py", "--layers", "4"]
    command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--json", "--", *script]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600).stdout)
    assert found["peak_allocated_bytes"] == pytest.approx(12.62 * GIB, rel=0.002)
    sizes = [one["bytes"] for one in found["trace"]["collectives"] if one["op"] == "all_to_all"]
    # Two each in forward, recomputation and backward of four layers and two steps, and how many tokens go where.
    assert [sizes.count(size) for size in (SENT, 1024)] == [2 * 4 * 6, 2 * 4 * 2]


SENT = 134_217_728
"""Bytes of each all-to-all of tokens in that dry run, of one sequence of 4,096 tokens."""


def test_experts_are_sent_what_a_dry_run_sends() -> None:
    on = instant()
    expected = 2 * collective_cost(on, "all_to_all", SENT, group_of(on, 8, 1)).seconds
    times = [costs(MODELS["qwen3"], on, ep=ep, seq_len=4096).layer(dense=False).forward_s for ep in (1, 8)]
    assert times[1] - times[0] == pytest.approx(expected, rel=1e-6)


def test_tokens_that_are_sent_once_cross_the_network_once_for_each_node() -> None:
    """Of 8 experts on 16 ranks of 2 nodes, 4 lie on the other node, and almost always at least one."""
    on, model = instant(), MODELS["qwen3"]
    alone = costs(model, on, ep=1, seq_len=4096).layer(dense=False).forward_s
    copies, once, *overlapped = (
        costs(model, on, ep=16, seq_len=4096, dispatch=how).layer(dense=False).forward_s - alone
        for how in ("copies", "once", "copies-overlapped", "once-overlapped")
    )
    assert copies / once == pytest.approx(4, rel=0.01)
    assert overlapped == pytest.approx([copies, once]), "nothing computes meanwhile"
    busy = made()
    for how in ("copies", "once"):
        plain, hidden = (
            costs(model, busy, ep=16, seq_len=4096, dispatch=dispatch).layer(dense=False).forward_s
            for dispatch in (how, f"{how}-overlapped")
        )
        assert hidden < plain


def test_routing_by_node_sends_a_token_to_4_of_8_nodes_at_most() -> None:
    """DeepSeek-V3's limit (arXiv 2412.19437, section 2.1.2); without it, 8 experts lie on 5.25 of 8 nodes."""
    on, limited = instant(), load_model("deepseek-v3")
    assert limited.experts is not None
    free = msgspec.structs.replace(limited, experts=msgspec.structs.replace(limited.experts, groups=1, active_groups=1))
    sent = []
    for model in (limited, free):
        alone, copies, once = (
            costs(model, on, ep=ep, seq_len=4096, dispatch=how).layer(dense=False).forward_s
            for ep, how in ((1, "copies"), (64, "copies"), (64, "once"))
        )
        sent.append(8 * (once - alone) / (copies - alone))
    assert 3.2 <= sent[0] <= 4, "3.2 experts of a token on a node make no difference (section 3.2.2)"
    assert sent[1] == pytest.approx(5.25, rel=0.01)


def test_experts_state_is_divided_once() -> None:
    """All 8 ranks together have each expert once: 16 bytes a parameter, as without expert parallelism."""
    model, of = MODELS["qwen3"], partial(estimated, model="qwen3-30b-a3b", cluster="dgx-h100x8", seq_len=4096)
    for ep in (1, 2, 8):
        memory = of(job(dp_shard=8, microbatches=2, ep=ep, seq_len=4096)).memory
        state = memory.masters + memory.optimizer + memory.gradients
        assert float(state[0]) == pytest.approx(16 * model.params / 8)
    split = of(job(strategy="megatron", dp_shard=4, tp=2, ep=8, seq_len=4096)).memory
    experts = model.n_layers * 3 * model.dim * model.experts.ffn_dim * 128  # type: ignore[union-attr]
    rest = model.params - experts
    # Expert ranks are also taken from tensor-parallel ranks; norms and routers are whole on each of these.
    assert float(split.masters[0]) == pytest.approx(4 * (experts / 8 + rest / 8), rel=0.01)


@pytest.mark.parametrize(("tp", "ep", "split"), [(2, 4, 1), (2, 4, 2), (4, 2, 2), (4, 4, 4), (2, 1, 2), (2, 1, 1)])
def test_ranks_that_split_experts_have_all_of_them_once_and_all_of_their_work(tp: int, ep: int, split: int) -> None:
    """16 ranks keep 12 bytes of state for each parameter, and 16 in sum with gradients, wherever the experts lie."""
    model, one = MODELS["qwen3"], Share(sequences=1, seq_len=4096)
    part = Share(sequences=1, seq_len=4096, tp=tp, ep=ep, expert_tp=split)
    for linear in feed_forward_linears(model, dense=False)[1:]:
        assert tp * product_of(model, linear, part).flops == pytest.approx(product_of(model, linear, one).flops)
    laid = job(strategy="megatron", dp_shard=16 // tp, tp=tp, ep=ep, expert_tp=split, seq_len=4096)
    memory = estimated(laid, model="qwen3-30b-a3b", cluster="dgx-h100x2", seq_len=4096).memory
    assert float(memory.masters[0]) == pytest.approx(4 * model.params / 16, rel=0.01)


def test_experts_that_are_split_gather_what_their_ranks_got_and_others_no_input() -> None:
    """Two ranks gather the tokens of both, 8 copies of each of 2,048 tokens; with whole experts, attention alone
    gathers and scatters (Megatron's dispatcher).
    """
    on, model = instant(), MODELS["qwen3"]
    whole, split = (
        costs(model, on, tp=2, ep=4, expert_tp=n, seq_len=4096).layer(dense=False).forward_s for n in (1, 2)
    )
    rows, pair, stream = 2 * 2048 * 8 * model.dim * 2, group_of(on, 2, 1), 4096 * model.dim * 2
    sums = [collective_cost(on, op, rows, pair).seconds for op in ("all_gather", "reduce_scatter")]
    exchanged = [
        2 * collective_cost(on, "all_to_all", rows // 2, group_of(on, 4, step)).seconds for step in (1, 2)
    ]  # fmt: skip
    attention = [collective_cost(on, op, stream, pair).seconds for op in ("all_gather", "reduce_scatter")]
    assert whole == pytest.approx(exchanged[0] + sum(attention))
    assert split == pytest.approx(exchanged[1] + sum(attention) + sum(sums))


def test_a_module_of_multi_token_prediction_has_what_deepseek_says() -> None:
    """11.5 B parameters of its own, and 2.4 B active with the embedding and the head (README_WEIGHTS.md of
    deepseek-ai/DeepSeek-V3).
    """
    plain = load_model("deepseek-v3")
    more = msgspec.structs.replace(plain, n_layers=62, predictions=1)
    assert parameter_count(more) - plain.params == pytest.approx(11.5e9, rel=0.01)
    ends = 2 * plain.vocab * plain.dim
    active = active_parameter_count(more) - active_parameter_count(plain) + ends
    assert active == pytest.approx(2.4e9, rel=0.06)
    # Its rank of the pipeline computes as much longer, by FLOPs, and has the embedding besides.
    wide = {"strategy": "megatron", "pp": 16, "dp_shard": 64, "ep": 64, "microbatches": 16, "seq_len": 4096}
    on = load_cluster("dgx-h100x128")
    found = estimate(more, on, 4096, columns(job(model="deepseek-v3", stages="4*15,2", **wide)))
    without = estimate(plain, on, 4096, columns(job(model="deepseek-v3", stages="4*15,1", **wide)))
    assert found.memory.peak[0] >= without.memory.peak[0]
    assert found.step_s[0] >= without.step_s[0]


def test_graphs_launch_kernels_that_the_host_would() -> None:
    model, slow = MODELS["qwen3"], made(host_s=1.0)

    def launched(**fields: Any) -> float:
        return costs(model, slow, ep=8, seq_len=4096, **fields).layer(dense=False).forward_s

    times = [launched(graphs=graphs) for graphs in ("none", "routers", "blocks", "steps")]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 1 < times[-2]
    assert launched(dispatch="once-overlapped") > launched(dispatch="once")
    assert launched(precision="fp8") > times[0], "operands are cast for each expert"


def test_dense_layers_come_first_in_a_pipeline() -> None:
    """DeepSeek-V3 has 3 on the first rank, which needs less memory for it, and less time."""
    wide = {"strategy": "megatron", "pp": 16, "dp_shard": 64, "ep": 64, "microbatches": 16, "seq_len": 4096}
    plain = load_model("deepseek-v3")
    assert plain.experts is not None
    even = msgspec.structs.replace(plain, experts=msgspec.structs.replace(plain.experts, dense_layers=0))
    mixed, all_routed = (
        estimate(model, load_cluster("dgx-h100x128"), 4096, columns(job(model="deepseek-v3", **wide)))
        for model in (plain, even)
    )
    assert mixed.memory.peak[0] <= all_routed.memory.peak[0]
    assert mixed.compute_s[0] == pytest.approx(all_routed.compute_s[0])
