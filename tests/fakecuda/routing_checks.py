"""Choices of a dry run, and what follows from them, for :mod:`tests.fakecuda.test_routing`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check
from tests.fakecuda.recorded import recorded

EXPERTS, TOP_K, TOKENS = 128, 8, 4100
MANY = 1 << 17
"""Tokens of which the choices take 8 MiB, which is more than is resident otherwise."""
ext: Any = sys.modules.get(NAME)  # none where pytest imports the figures


def scores(tokens: int = TOKENS, experts: int = EXPERTS) -> torch.Tensor:
    """A router's, which nothing computed."""
    return torch.ones(tokens, 256, device="cuda") @ torch.ones(256, experts, device="cuda")


def under(rule: str, exponent: float = 0.0, rank: int = 0, ranks: int = 1) -> None:
    ext.set_routing(rule, exponent, rank, ranks)


def counts_of(rule: str, exponent: float, tokens: int, experts: int, top_k: int) -> list[int]:
    under(rule, exponent)
    chosen = scores(tokens, experts).topk(top_k, dim=-1).indices
    return chosen.flatten().bincount(minlength=experts).tolist()


@check
def distinct() -> dict[str, bool]:
    """Whether a token's experts all differ."""
    found = {}
    for rule in ("balanced", "zipf", "worst"):
        under(rule, 1.2)
        for tokens in (TOKENS, MANY):
            chosen = scores(tokens).topk(TOP_K, dim=-1).indices.sort(dim=-1).values
            found[f"{rule} {tokens}"] = bool((chosen.diff(dim=-1) > 0).all())
    return found


@check
def counts() -> dict[str, list[int]]:
    """Tokens of each expert."""
    return {
        "balanced": counts_of("balanced", 0, TOKENS, EXPERTS, TOP_K),
        "many": counts_of("balanced", 0, MANY, EXPERTS, TOP_K),
        "zipf, whole": counts_of("zipf", 1, 1200, 4, 1),
        "zipf, rounded": counts_of("zipf", 1, 1201, 4, 2),
        "zipf, one with all tokens": counts_of("zipf", 2, 1200, 4, 2),
        "worst": counts_of("worst", 0, 1200, 8, 2),
    }


@check
def worst_of_a_rank() -> list[list[int]]:
    """Experts of every token, where the rank is the second of four, with fewer experts than a token has, or enough."""
    found = []
    for top_k in (2, 3):
        under("worst", 0, 1, 4)
        found.append(scores(TOKENS, 8).topk(top_k, dim=-1).indices.unique(dim=0).tolist())
    return found


@check
def ways_to_count() -> dict[str, bool]:
    """Whether each gives the counts that bincount gives."""
    under("zipf", 1.2)
    found: dict[str, bool] = {}
    for tokens in (TOKENS, MANY):
        chosen = scores(tokens).topk(TOP_K, dim=-1).indices
        flat = chosen.flatten()
        right = flat.bincount(minlength=EXPERTS)
        mask = torch.zeros(tokens, EXPERTS, dtype=torch.int64, device="cuda").scatter_(1, chosen, 1)
        ways = {
            "histc of integers": torch.histc(flat.int(), bins=EXPERTS, min=0, max=EXPERTS - 1),
            "histc of floats": torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS),
            "scatter": mask.sum(0),
            "scatter of booleans": torch.zeros_like(mask, dtype=torch.bool).scatter(1, chosen, True).sum(0),
            "offsets": torch.searchsorted(flat.sort().values, torch.arange(EXPERTS + 1, device="cuda")).diff(),
            "by comparison": torch.stack([(flat == expert).sum() for expert in range(EXPERTS)]),
            "by mask": torch.tensor([len(torch.where(mask[:, expert])[0]) for expert in range(EXPERTS)], device="cuda"),
            "on the host": flat.cpu().bincount(minlength=EXPERTS).cuda(),
        }  # fmt: skip
        if tokens == TOKENS:
            ways["one_hot"] = F.one_hot(chosen, EXPERTS).sum(dim=(0, 1))
        found |= {f"{name}, {tokens}": one.long().tolist() == right.tolist() for name, one in ways.items()}
    return found


@check
def remembered() -> list[bool]:
    """Whether sorts are right that come again, with the same values and with others, however these came to be."""
    under("zipf", 1.2)
    flat = scores(MANY).topk(TOP_K, dim=-1).indices.flatten()

    def right() -> bool:
        values, order = flat.sort(stable=True)
        host = flat.cpu().sort(stable=True)
        return bool((values.cpu() == host.values).all()) and bool((order.cpu() == host.indices).all())

    found = [right(), right()]
    flat[7] = 3 if flat[7] == 5 else 5
    found.append(right())
    flat += 1
    return [*found, right(), right()]


@check
def other_choices() -> dict[str, Any]:
    """Counts of what other operators choose; the first of an order; whether an order holds each place once."""
    under("balanced")
    given = scores(1024, 8)
    order = given.argsort(dim=-1, descending=True)
    drawn = torch.bernoulli(torch.rand(MANY, device="cuda"))
    by_token = given.topk(3, dim=0).indices
    return {
        "argmax": given.argmax(-1).bincount(minlength=8).tolist(),
        "max": given.max(-1).indices.bincount(minlength=8).tolist(),
        "multinomial": torch.multinomial(given, 2).flatten().bincount(minlength=8).tolist(),
        "repeated": torch.multinomial(given, 16, replacement=True).flatten().bincount(minlength=8).tolist(),
        "first two of an order": order[:, :2].flatten().bincount(minlength=8).tolist(),
        "order": bool((order.sort(-1).values == torch.arange(8, device="cuda")).all()),
        "bernoulli": drawn.sum().item(),
        "tokens of an expert": bool((by_token.sort(dim=0).values.diff(dim=0) > 0).all()),
        "again": bool((given.topk(2).indices == scores(1024, 8).topk(2).indices).all()),
    }


@check
def grouped_products() -> dict[str, list[Any]]:
    """Launches of a grouped product, and the shape of what it gives: one kernel takes bf16 alone."""
    under("balanced")
    ends = scores(1200, 8).argmax(-1).bincount(minlength=8).cumsum(0).int()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weights = (torch.empty(*shape, dtype=dtype, device="cuda") for shape in ((1200, 64), (8, 64, 32)))
        with recorded() as lines:
            out = F.grouped_mm(x, weights, offs=ends)
        products = [line for line in lines if "mm" in line]
        found[str(dtype)] = [len(products), products[0], list(out.shape)]
    return found


@check
def capacity() -> list[int]:
    """Tokens that a buffer of 300 a expert takes, where a token's place is how many came before it."""
    under("zipf", 1.0)
    chosen = F.one_hot(scores(1200, 4).argmax(-1), 4)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return [int((place <= 300).sum()), len(place[place <= 300])]


@check
def named() -> list[Any]:
    """What is recorded: nothing until a choice is used, and never if only its values are."""
    before = ext.assumed()[0]
    given = scores(77, 12)
    given.max(-1, keepdim=True).values.sum()
    chosen = given.topk(5).indices
    unused = ext.assumed()[0]
    chosen.flatten().bincount(minlength=12)
    chosen.sort()
    return [before == unused, sorted(set(map(tuple, ext.assumed()[0])) - set(map(tuple, before)))]


@check
def exchanges() -> dict[str, Any]:
    """Rank 1 of 4: tokens it sends to each rank, and gets of each, for two experts a rank."""
    dist.init_process_group("nccl", rank=1, world_size=4)
    found: dict[str, Any] = {"read outside modules": ext.assumed()[1]}
    ext.push_module(ext.module_code("router"))
    for rule in ("balanced", "worst"):
        under(rule, 0, 1, 4)
        for tokens in (1024, MANY):
            chosen = scores(tokens, 8).topk(2, dim=-1).indices.flatten()
            sent = chosen.bincount(minlength=8)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            to_ranks, from_ranks = sent.view(4, 2).sum(1).tolist(), received.view(4, 2).sum(1).tolist()
            ids = torch.empty(sum(from_ranks), dtype=torch.int64, device="cuda")
            dist.all_to_all_single(ids, chosen.sort().values, from_ranks, to_ranks)
            every = [torch.empty_like(sent) for _ in range(4)]
            dist.all_gather(every, sent)
            found[f"{rule}, {tokens}"] = {
                "to": to_ranks, "from": from_ranks, "ids": ids.bincount(minlength=8).tolist(),
                "gathered": all(one.tolist() == sent.tolist() for one in every),
            }  # fmt: skip
    ext.pop_module()
    dist.destroy_process_group()
    found["place"] = ext.assumed()[1:]
    return found
