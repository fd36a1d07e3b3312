"""A dry run of what training scripts use besides a transformer's operators, for :mod:`tests.fakecuda.test_breadth`."""

import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from refshard.dryrun.recording import Kind
from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check
from tests.fakecuda.dry_checks import WIDE, shapes, through


def large(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", requires_grad=True, **options)


def recorded(run: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
    """The recording of what this runs, and the names of its launches."""
    ext: Any = sys.modules[NAME]
    ext.clear_recording()
    ext.record(True)
    run()
    ext.record(False)
    table = ext.recording()
    return table, [table["name_table"][name] for of, name in zip(table["kinds"], table["names"]) if of == Kind.LAUNCH]


def refusal(run: Callable[[], Any]) -> str:
    try:
        run()
    except NotImplementedError as error:
        return str(error).splitlines()[0]
    return ""


@check
def sizes_by_value() -> dict[str, Any]:
    """The largest that they can be."""
    x, ids = large(WIDE, WIDE), torch.zeros(WIDE, WIDE, dtype=torch.int64, device="cuda")
    return {
        "masked_select": shapes([x.masked_select(x > 0), x.masked_select((x > 0)[0])]),
        "unique": shapes(torch.unique(ids, return_inverse=True, return_counts=True)),
        "unique of rows": shapes(torch.unique(ids, dim=0, return_inverse=True)),
        "consecutive": shapes(torch.unique_consecutive(ids, return_counts=True)),
        "bincount": shapes([torch.bincount(ids.view(-1), minlength=8)]),
    }


@check
def losses_and_samples() -> dict[str, Any]:
    rows, targets = large(50, 16, 20), torch.ones(16, 30, dtype=torch.int64, device="cuda")
    ctc = F.ctc_loss(rows.log_softmax(2), targets, torch.full((16,), 50), torch.full((16,), 30))
    scores, labels = large(64, WIDE), torch.zeros(64, dtype=torch.int64, device="cuda")
    (of_scores,) = torch.autograd.grad(F.multi_margin_loss(scores, labels), scores)
    return {
        "ctc": shapes(torch.autograd.grad(ctc, rows)),
        "margin": shapes([of_scores]),
        "dirichlet": shapes([torch.distributions.Dirichlet(scores.exp()).rsample()]),
        "fake quantisation": shapes(
            torch.autograd.grad(torch.fake_quantize_per_tensor_affine(scores, 0.1, 0, -128, 127).sum(), scores)
        ),
        "gru cell": shapes([nn.GRUCell(WIDE, WIDE).cuda()(large(8, WIDE))]),
    }


@check
def recurrent() -> dict[str, Any]:
    lstm = nn.LSTM(64, 128, 2, bidirectional=True, dropout=0.1).cuda()
    x = large(10, 4, 64)

    def train() -> None:
        lstm(x)[0].sum().backward()

    table, launches = recorded(train)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([10, 9, 8, 7]))
    return {
        "shapes": through(nn.GRU(64, 128), 10, 4, 64),
        "projected": shapes([lstm(x)[0], nn.LSTM(64, 128, proj_size=32).cuda()(x)[0], lstm(packed)[0].data]),
        "launches": sum("rnn" in name for name in launches),
        "kept": 10 * 4 * 128 * 2 * 2 * 6 * 4 in table["sizes"],
        "buffers": len({weight.untyped_storage().data_ptr() for weight in lstm.parameters()}),
    }


@check
def experts() -> dict[str, Any]:
    """A router's places are within the experts, as many for each."""
    scores = torch.ones(WIDE, 16, device="cuda")
    chosen = scores.topk(2, dim=-1).indices
    return {
        "counts": torch.bincount(chosen.view(-1), minlength=16).tolist(),
        "drawn": int(torch.multinomial(scores, 4).max()),
        "highest": [int(scores.argmax(-1).max()), int(scores.argmax(0).max()), int(scores.argmax())],
    }


@check
def comparisons() -> list[bool]:
    """Of values that nobody has, which read as 1: finite, and what a distribution takes as a scale."""
    x = torch.ones(WIDE, WIDE, device="cuda")
    found = [(x == x).all(), x.isnan().any(), x.isfinite().all(), (x > 0).all(), (x < 0).any(), (x >= x).all()]
    return [bool(one) for one in found]


@check
def storages() -> dict[str, Any]:
    """A checkpoint is loaded straight to the GPU."""
    saved, x = io.BytesIO(), torch.arange(6)
    torch.save({"here": x, "there": x.cuda(), "large": torch.ones(WIDE, WIDE)}, saved)
    saved.seek(0)
    loaded = torch.load(saved, map_location="cuda")
    made = torch.UntypedStorage(64, device="cuda:1")
    return {
        "values": [loaded["here"].tolist(), loaded["there"].tolist()],
        "devices": sorted({str(one.device) for one in loaded.values()}),
        "made": [str(made.device), made.nbytes(), torch.UntypedStorage(3).nbytes(), list(torch.UntypedStorage([7]))],
    }


@check
def copies_in_backward() -> bool:
    """A copy that autograd's own thread waits for: it has no Python code to name."""
    x = large(WIDE, WIDE)
    table, _ = recorded(lambda: x.cpu().cuda().sum().backward())
    return any(kind == Kind.SYNCHRONISE for kind in table["kinds"])


@check
def copies_name_what_they_fill() -> bool:
    made = []
    table, _ = recorded(lambda: made.append(torch.ones(WIDE, WIDE).cuda()))
    allocated = [table["name_table"][name] for of, name in zip(table["kinds"], table["names"]) if of == Kind.ALLOCATE]
    return allocated == ["aten::copy_"]


@check
def layouts() -> dict[str, str]:
    parts = [torch.ones(3, 64, device="cuda"), torch.ones(5, 64, device="cuda")]

    def sparse_gradient() -> None:
        ids = torch.zeros(4, dtype=torch.int64, device="cuda")
        nn.Embedding(WIDE, 64, sparse=True).cuda()(ids).sum().backward()

    return {"sparse": refusal(sparse_gradient), "strided": refusal(lambda: torch.nested.as_nested_tensor(parts))}


@check
def attention_kernels() -> dict[str, Any]:
    from torch.backends import cuda

    half, full = large(2, 8, 256, 64, dtype=torch.bfloat16), large(2, 8, 256, 64)

    def usable(x: torch.Tensor) -> list[bool]:
        asked = cuda.SDPAParams(x, x, x, None, 0.0, True, False)
        kernels = (cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention)
        return [kernel(asked) for kernel in kernels]

    rows = torch.nested.nested_tensor(
        [torch.ones(n, 8, 64) for n in (100, 200, 50)], layout=torch.jagged, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()
    q = rows.transpose(1, 2)
    out: list[Any] = []
    _, launches = recorded(lambda: out.append(F.scaled_dot_product_attention(q, q, q)))
    return {
        "half": usable(half), "full": usable(full), "jagged": list(out[0].transpose(1, 2).values().shape),
        "kernels": [name for name in launches if "attention" in name],
    }  # fmt: skip


@check
def checkpoints() -> dict[str, Any]:
    """This rank's part of a distributed checkpoint is written and read again."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=4)
    mesh = init_device_mesh("cuda", (4,))
    part = distribute_tensor(torch.ones(WIDE, WIDE), mesh, [Shard(0)])
    small = torch.arange(6, device="cuda")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        save({"part": part, "small": small}, checkpoint_id=folder)
        read = {"part": torch.zeros_like(part), "small": torch.zeros_like(small)}
        load(read, checkpoint_id=folder)
    dist.destroy_process_group()
    return {"small": read["small"].tolist(), "part": isinstance(read["part"], DTensor)}


@check
def pipelines() -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("nccl", rank=1, world_size=3)
    layer, x = nn.Linear(WIDE, WIDE).cuda(), large(2, WIDE)

    def step(**shapes_given: Any) -> None:
        stage = PipelineStage(layer, 1, 3, torch.device("cuda"), **shapes_given)
        Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, _: out.sum()).step()

    try:
        step(input_args=x, output_args=x)
        assert layer.weight.grad is not None
        return {"gradient": list(layer.weight.grad.shape), "refused": refusal(step)}
    finally:
        dist.destroy_process_group()
