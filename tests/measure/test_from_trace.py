"""A profile from a trace: laws that are known come back, and what a trace falsifies is kept."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from refshard.analysis.figures import OperatorClass, OperatorFigures
from refshard.cli import app
from refshard.costs import attention_seconds, move_seconds, product_seconds
from refshard.dryrun.price import TIMES
from refshard.errors import SpecError
from refshard.measure.calibration.from_trace import fitted, profile_from_trace
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.hardware import AttentionPoint, HardwareSpec, load_hardware
from refshard.specs.reading import convert, read_toml

H200 = Path(__file__).parents[1] / "analysis" / "h200" / "fake_rank0of8.json.gz"
SHIPPED = load_hardware("h200-sxm")


def other(efficiency: float, memory: float, point: AttentionPoint) -> HardwareSpec:
    """Hardware with other rates than those shipped."""
    matmul = {**SHIPPED.matmul, "bf16": msgspec.structs.replace(SHIPPED.matmul["bf16"], efficiency=efficiency)}
    return msgspec.structs.replace(SHIPPED, matmul=matmul, memory_bytes_per_s=memory, attention_points=(point,))


def operator(
    name: str, kind: OperatorClass, shapes: str, seconds: float, *, flops: int | None = None, size: int = 0
) -> OperatorFigures:
    """Three calls of ``seconds`` each."""
    return OperatorFigures(
        name=name, kind=kind, shapes=shapes, dtype="bf16", calls=3, ns=round(3 * seconds * 1e9), share=0.1,
        flops=flops, bytes=size,
    )  # fmt: skip


def step_on(hardware: HardwareSpec) -> list[OperatorFigures]:
    """Products, attention and elementwise kernels at exactly this hardware's rates."""
    m, n, k, heads, length, width = 8192, 4096, 4096, 32, 4096, 128
    flops, size = 2 * m * n * k, 2 * (m * k + k * n + m * n)
    scores, shapes = heads * length**2 // 2, f"[1, {heads}, {length}, {width}]"
    attention = {
        backward: attention_seconds(
            hardware, "bf16", heads=heads, seq_len=length, head_dim=width, backward=backward, kernel="cudnn"
        )
        for backward in (False, True)
    }
    name, moved = "aten::_scaled_dot_product_cudnn_attention", 2**28
    return [
        operator("aten::mm", "GEMM", "", product_seconds(hardware, "bf16", flops, size), flops=flops, size=size),
        operator("aten::mm", "GEMM", "", 1.0, flops=2 * m * n, size=2 * (m + n + m * n)),  # bound by memory
        operator(name, "attention", shapes, attention[False], flops=4 * width * scores),
        operator(f"{name}_backward", "attention", shapes, attention[True], flops=10 * width * scores),
        operator("aten::mul", "elementwise", "", move_seconds(hardware, moved * TIMES["mul"]), size=moved),
        operator("aten::add", "elementwise", "", 1.0, size=2**20),  # in the cache
    ]


POINT = AttentionPoint(kernel="cudnn", dtype="bf16", head_dim=128, seq_len=4096, forward_s=1.1e-12, backward_s=3.2e-12)


def test_known_rates_come_back_and_say_where_they_are_from() -> None:
    found, kept = fitted(SHIPPED, step_on(other(0.6, 3.6e12, POINT)), "t.json", busy=0.95)
    assert found.matmul["bf16"].efficiency == pytest.approx(0.6, rel=1e-3)
    assert found.matmul["fp32"] == SHIPPED.matmul["fp32"]
    assert found.memory_bytes_per_s == pytest.approx(3.6e12, rel=1e-3)
    (point,) = (p for p in found.attention_points if (p.head_dim, p.seq_len) == (128, 4096))
    assert (point.forward_s, point.backward_s) == pytest.approx((1.1e-12, 3.2e-12), rel=1e-3)
    assert len(found.attention_points) == len(SHIPPED.attention_points)
    assert found.sources["matmul"].startswith("efficiency: bf16 t.json, 3 kernels; else: ")
    assert found.sources["attention_points"].startswith("cudnn 128 x 4096: t.json, 6 kernels; ")
    assert found.sources["memory_bytes_per_s"] == "elementwise kernels: t.json, 3 kernels"
    assert kept.keys() == {"host_s", "optimizer_bytes_per_s"}
    assert found.host_s == SHIPPED.host_s


def test_products_of_a_gpu_that_idles_are_bursts() -> None:
    found, kept = fitted(SHIPPED, step_on(other(0.9, 3.6e12, POINT)), "t.json", busy=0.4)
    assert (found.matmul, found.attention_points) == (SHIPPED.matmul, SHIPPED.attention_points)
    assert found.matmul_burst["bf16"].efficiency == pytest.approx(0.9, rel=1e-3)
    assert kept["matmul, attention"] == "the GPU is busy for 40% of a step: its clocks are those of bursts"


def test_nothing_known_changes_nothing() -> None:
    assert fitted(SHIPPED, (), "t.json", busy=1.0)[0] == SHIPPED


def test_a_real_trace_becomes_a_profile_that_can_be_read(tmp_path: Path) -> None:
    shipped, profile = profile_from_trace(H200)
    assert shipped == load_cluster("hgx-h200")
    assert profile.accelerator.matmul["bf16"].efficiency == pytest.approx(0.75, abs=0.03)
    assert profile.accelerator.memory_bytes_per_s == pytest.approx(4.05e12, rel=0.03)
    assert profile.within == shipped.within, "torch's fake process group sends nothing"
    result = CliRunner().invoke(app, ["calibrate", "--from-trace", str(H200), "--out", str(tmp_path / "mine.toml")])
    assert result.exit_code == 0, result.output
    assert "matmul.bf16.efficiency" in result.output
    assert convert(read_toml(tmp_path / "mine.toml"), ClusterSpec, where="mine") == profile


def test_from_trace_measures_nothing() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--from-trace", str(H200), "--quick"])
    assert isinstance(result.exception, SpecError)
    assert str(result.exception) == "from-trace: nothing is measured; leave out --quick"
