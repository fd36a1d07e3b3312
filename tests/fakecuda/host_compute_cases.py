"""Computations that training consists of, each to be run on the CPU and on a fake GPU with the same result.

A case takes a device and returns tensors; whatever it draws, it draws on the CPU and moves.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Case = Callable[[str], Iterable[torch.Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


def drawn(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf that requires a gradient if its dtype can."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.to(device).requires_grad_(dtype.is_floating_point)


def whole(device: str, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def placed(module: nn.Module, device: str) -> nn.Module:
    """The same weights on every device."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module.to(device)


def with_gradients(out: torch.Tensor, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of the sum of its squares."""
    inputs = list(inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=True)]


def through(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module = placed(module, x.device.type)
    return with_gradients(module(x), [x, *module.parameters()])


@case
def convolution_2d(device: str) -> Iterable[torch.Tensor]:
    return through(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), drawn(device, 2, 4, 9, 9))


@case
def convolution_channels_last(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 2, 4, 8, 8).detach().to(memory_format=torch.channels_last).requires_grad_()
    return through(nn.Conv2d(4, 8, 3, dilation=2).to(memory_format=torch.channels_last), x)  # type: ignore[call-overload]


@case
def convolution_depthwise_1d(device: str) -> Iterable[torch.Tensor]:
    return through(nn.Conv1d(6, 6, 4, padding=3, groups=6), drawn(device, 2, 6, 12))


@case
def convolution_transposed(device: str) -> Iterable[torch.Tensor]:
    return through(nn.ConvTranspose2d(4, 3, 4, stride=2), drawn(device, 2, 4, 5, 5))


@case
def batch_norm(device: str) -> Iterable[torch.Tensor]:
    module = nn.BatchNorm2d(4)
    found = through(module, drawn(device, 3, 4, 5, 5))
    assert module.running_mean is not None
    assert module.running_var is not None
    module.eval()
    return [*found, module.running_mean, module.running_var, module(drawn(device, 2, 4, 5, 5, seed=1))]


@case
def norms(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 3, 4, 8)
    return [
        *through(nn.LayerNorm(8), x), *through(nn.RMSNorm(8), x), *through(nn.GroupNorm(2, 4), x),
        *through(nn.RMSNorm((4, 8), elementwise_affine=False), x),
    ]  # fmt: skip


@case
def rms_norm_bf16(device: str) -> Iterable[torch.Tensor]:
    return through(nn.RMSNorm(8, dtype=torch.bfloat16), drawn(device, 3, 8, dtype=torch.bfloat16))


@case
def embeddings(device: str) -> Iterable[torch.Tensor]:
    table = drawn(device, 11, 5)
    tokens = whole(device, 11, 3, 7)
    bag = F.embedding_bag(tokens, table, mode="mean")
    return [*with_gradients(F.embedding(tokens, table, padding_idx=2), [table]), *with_gradients(bag, [table])]


@case
def attention(device: str) -> Iterable[torch.Tensor]:
    query, key, value = (drawn(device, 2, 4, 6, 8, seed=seed) for seed in range(3))
    causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    masked = F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], attn_mask=mask, enable_gqa=True)
    return [*with_gradients(causal, [query, key, value]), *with_gradients(masked, [query, key, value])]


@case
def transformer_layer(device: str) -> Iterable[torch.Tensor]:
    return through(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), drawn(device, 2, 5, 8))


@case
def losses(device: str) -> Iterable[torch.Tensor]:
    logits, other, classes = drawn(device, 6, 7), drawn(device, 6, 7, seed=1), whole(device, 7, 6)
    classes[2] = -100
    found = [
        F.cross_entropy(logits, classes, label_smoothing=0.1),
        F.cross_entropy(logits, other.softmax(-1)),
        F.nll_loss(logits.log_softmax(-1), classes.clamp(min=0), weight=torch.arange(7.0, device=device)),
        F.mse_loss(logits, other),
        F.smooth_l1_loss(logits, other),
        F.huber_loss(logits, other),
        F.kl_div(logits.log_softmax(-1), other.softmax(-1), reduction="batchmean"),
        F.binary_cross_entropy_with_logits(logits, other.sigmoid()),
        F.cosine_embedding_loss(logits, other, torch.ones(6, device=device)),
        F.triplet_margin_loss(logits, other, logits.flip(0)),
        F.margin_ranking_loss(logits[:, 0], other[:, 0], torch.ones(6, device=device)),
    ]
    return [gradient for loss in found for gradient in with_gradients(loss, [logits])]


@case
def ctc_loss(device: str) -> Iterable[torch.Tensor]:
    logits = drawn(device, 12, 2, 5)
    targets, lengths = whole(device, 4, 2, 3) + 1, torch.tensor([3, 2])
    return with_gradients(F.ctc_loss(logits.log_softmax(-1), targets, torch.tensor([12, 10]), lengths), [logits])


@case
def activations(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 4, 6)
    functions = (F.relu, F.gelu, F.silu, F.glu, F.elu, F.mish, F.softplus, F.leaky_relu, F.hardswish, torch.tanh)
    return [one for function in functions for one in with_gradients(function(x), [x])]


@case
def sorting(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 5, 9)
    values, places = x.topk(4, dim=-1)
    in_order, order = x.sort(dim=0, stable=True)
    return [
        *with_gradients(values, [x]), places, *with_gradients(in_order, [x]), order, x.argmax(-1), x.kthvalue(3)[0],
        x.median(-1)[0], x.unique(), torch.bincount(whole(device, 4, 20)), x.nonzero(), x[x > 0], x.cummax(-1)[1],
    ]  # fmt: skip


@case
def indexing(device: str) -> Iterable[torch.Tensor]:
    x, rows = drawn(device, 6, 5), whole(device, 6, 4)
    on_host = torch.tensor([0, 3, 3])
    filled = x.detach().clone()
    filled[rows] = 1
    filled[on_host, 2] = 7
    filled.index_add_(0, rows, torch.ones(4, 5, device=device))
    filled.scatter_add_(1, whole(device, 5, 6, 2), torch.ones(6, 2, device=device))
    picked = [
        x[rows],
        x[on_host],
        x.index_select(0, rows),
        x.gather(1, whole(device, 5, 6, 2)),
        x[::2, 1:3],
        x[None, ..., -1],
    ]
    return [filled, *(one for part in picked for one in with_gradients(part, [x])), x.masked_fill(x > 0, 2).detach()]


@case
def views(device: str) -> Iterable[torch.Tensor]:
    base = torch.zeros(4, 6, device=device)
    base.view(-1)[3:9].add_(1)
    base.t()[1].mul_(3)
    base.diagonal().fill_(5)
    left, right = base.chunk(2, dim=1)
    left.copy_(right)
    torch.add(base[0], 1, out=base[1])
    base[2:].transpose(0, 1).contiguous().zero_()
    strided = base.as_strided((3, 2), (6, 2), 1)
    strided.sub_(1)
    return [base, strided, base.unfold(1, 3, 2), base.real, base.expand(2, 4, 6).sum(0), base.view(torch.int32)]


@case
def outputs_given(device: str) -> Iterable[torch.Tensor]:
    a, b = drawn(device, 3, 4).detach(), drawn(device, 4, 5).detach()
    fresh, right = torch.empty(0, device=device), torch.full((3, 5), 9.0, device=device)
    torch.mm(a, b, out=fresh)
    torch.mm(a, b, out=right)
    both = torch.empty(3, 8, device=device)
    torch.cat([a, a * 2], dim=1, out=both)
    torch.cumsum(a, 0, out=both[:, :4])
    return [fresh, right, both]


@case
def complex_numbers(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 4, 6)
    spectrum = torch.fft.rfft(x)
    rotated = torch.view_as_complex(x.view(4, 3, 2)) * torch.polar(
        torch.ones(3, device=device), torch.arange(3.0, device=device)
    )
    inner = torch.view_as_real(rotated).flatten(1)
    conjugate = spectrum.conj() @ spectrum.mT
    return [*with_gradients(torch.fft.irfft(spectrum, n=6), [x]), *with_gradients(inner, [x]), conjugate.abs()]


@case
def linear_algebra(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 4, 4)
    positive = x @ x.mT + 4 * torch.eye(4, device=device)
    found = [torch.linalg.cholesky(positive), torch.linalg.inv(positive), torch.linalg.det(positive)]
    found += [torch.einsum("ij,kj->ik", x, x), torch.linalg.solve(positive, x), torch.linalg.qr(x)[0].abs()]
    return [one for part in found for one in with_gradients(part, [x])]


@case
def wider_products(device: str) -> Iterable[torch.Tensor]:
    a, b = (drawn(device, 4, 4, seed=seed, dtype=torch.bfloat16).detach() for seed in range(2))
    products = [torch.mm(a, b, out_dtype=torch.float32), torch.bmm(a[None], b[None], out_dtype=torch.float32)]
    wanted = a.float() @ b.float()
    return products if device == "cuda" else [wanted, wanted[None]]


@case
def double_backward(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 3, 4)
    (first,) = torch.autograd.grad(x.sigmoid().pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    hessian = torch.autograd.functional.hessian(lambda y: (y.tanh() ** 3).sum(), x[0].detach())
    norm = torch.autograd.grad(x.sgn().sum() + x.norm(), x)[0]
    return [first, second, hessian, norm]


@case
def function_transforms(device: str) -> Iterable[torch.Tensor]:
    x, weight = drawn(device, 3, 4).detach(), drawn(device, 4, seed=1).detach()
    per_row = torch.vmap(torch.func.grad(lambda w, row: (row @ w).tanh(), argnums=0), in_dims=(None, 0))(weight, x)
    forward = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    return [per_row, *forward]


@case
def checkpointed(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 3, 8)
    module = placed(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), device)
    return with_gradients(checkpoint(module, x, use_reentrant=False), [x, *module.parameters()])


@case
def autocast(device: str) -> Iterable[torch.Tensor]:
    x, weight = drawn(device, 4, 8), drawn(device, 8, 8, seed=1)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.linear(x, weight)
        mixed = out.float().softmax(-1) @ weight
    return [out, *with_gradients(mixed, [x, weight])]


@case
def scaled_gradients(device: str) -> Iterable[torch.Tensor]:
    """A step that overflows is skipped, and halves the scale."""
    weight = drawn(device, 4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(4):
        loss = (weight * (float("inf") if step == 1 else 1.0)).square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [weight, torch.tensor(scales, device=device)]


def _optimized(device: str, make: Callable[..., torch.optim.Optimizer], **options: Any) -> list[torch.Tensor]:
    parameters = [drawn(device, 3, 4), drawn(device, 5, seed=1)]
    optimizer = make(parameters, lr=0.1, **options)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = drawn(device, *parameter.shape, seed=10 * step + index).detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return parameters


@case
def fused_optimizers(device: str) -> Iterable[torch.Tensor]:
    made: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.Adagrad, {}),
    ]  # fmt: skip
    return [one for make, options in made for one in _optimized(device, make, fused=True, **options)]


@case
def foreach_optimizers(device: str) -> Iterable[torch.Tensor]:
    kinds = (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax)
    made: list[torch.Tensor] = []
    for make in kinds:
        made += _optimized(device, make, foreach=True)
    return [*made, *_optimized(device, torch.optim.AdamW, capturable=device == "cuda", foreach=True)]


@case
def foreach(device: str) -> Iterable[torch.Tensor]:
    lists = [[drawn(device, 3, seed=seed).detach(), drawn(device, 2, 2, seed=seed + 5).detach()] for seed in range(3)]
    a, b, c = lists
    torch._foreach_add_(a, b, alpha=0.5)
    torch._foreach_mul_(a, 2.0)
    torch._foreach_addcmul_(a, b, c, value=0.1)
    torch._foreach_lerp_(a, b, 0.25)
    torch._foreach_copy_(c, b)
    torch._foreach_copy_(b, [torch.ones(3), torch.zeros(2, 2)])  # from the host
    back = [torch.empty(3), torch.empty(2, 2)]
    torch._foreach_copy_(back, a)
    return [*a, *b, *c, *torch._foreach_norm(a), *torch._foreach_sqrt(torch._foreach_abs(a)), *back]


@case
def copies(device: str) -> Iterable[torch.Tensor]:
    x = drawn(device, 3, 4).detach()
    half = x.to(torch.bfloat16, copy=True)
    turned = torch.empty(4, 3, device=device).t().copy_(x)
    there = x.to("cpu", non_blocking=True)
    on_another = x.to("cuda:1") if device == "cuda" else x
    other = copy.deepcopy(nn.Linear(3, 4).to(device))
    return [half, turned, there, on_another.cpu(), other.weight * 0, x.double(), x.long(), x[0].expand(3, 4).clone()]


@case
def factories(device: str) -> Iterable[torch.Tensor]:
    like = torch.ones(2, 3, device=device)
    return [
        torch.arange(7, device=device), torch.linspace(0, 1, 5, device=device), torch.eye(3, device=device),
        torch.full((2,), 4, device=device), torch.zeros_like(like), like.new_full((2, 2), 3.0), torch.tril(like),
        torch.tensor([1.5, 2.0], device=device), torch.ones(0, 4, device=device).sum(0),
        torch.scalar_tensor(3.0, device=device),
        torch.randperm(5, generator=torch.Generator().manual_seed(0)).to(device),
    ]  # fmt: skip
