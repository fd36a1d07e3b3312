"""Random programs on integer tensors: what they are made of, and how one runs on the device and on the CPU at once."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import strategies as st

LARGE = (4 << 20) + 4
"""Elements: of every type too many to be resident."""
VALUES = (-300, -1, 0, 1, 2, 100, 2000, 2**40)
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64)
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)

Action = Literal[
    "full", "arange", "like", "fill", "zero", "fill_from", "copy", "count", "compare", "select", "positions", "add"
]


class Step(NamedTuple):
    """One call. Numbers pick tensors, types, values and comparisons, or cut views, modulo how many there are."""

    action: Action
    tensor: int
    other: int
    kind: int
    value: int
    start: int
    length: int


steps = st.builds(
    Step,
    action=st.sampled_from([
        "full", "arange", "like", "fill", "fill", "zero", "fill_from", "copy", "copy", "copy", "count", "compare",
        "compare", "select", "select", "positions", "add",
    ]),
    tensor=st.integers(0, 7), other=st.integers(0, 7), kind=st.integers(0, 5), value=st.integers(0, 7),
    start=st.one_of(st.integers(0, 3), st.integers(0, LARGE)),
    length=st.one_of(st.integers(1, 9), st.integers(1, 500), st.just(LARGE)),
)  # fmt: skip
programs = st.lists(steps, min_size=1, max_size=12)


@dataclass
class Pair:
    """A tensor on the device and the same on the CPU. The device may not know the values of a doubtful one."""

    device: torch.Tensor
    host: torch.Tensor
    doubtful: bool = False

    def cut(self, step: Step) -> "Pair":
        """A view of it."""
        start = step.start % len(self.host)
        end = min(start + step.length, len(self.host))
        return Pair(self.device[start:end], self.host[start:end], self.doubtful)


class Pool:
    """The tensors of a program, of ``length`` elements or fewer.

    If they are short, every other one is a part of a large tensor, and the rest are resident.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.pairs: list[Pair] = []
        self._add(_made(lambda device: torch.arange(length, device=device)))

    def run(self, step: Step) -> None:
        """Run one step on both devices."""
        pair, other = self._pick(step.tensor), self._pick(step.other)
        value, dtype = VALUES[step.value], DTYPES[step.kind]
        match step.action:
            case "full":
                value = value if _fits(value, dtype) else 1
                self._add(_made(lambda device: torch.full((self.length,), value, dtype=dtype, device=device)))
            case "arange":
                end = value + 3 * min(step.length, self.length)
                self._add(_made(lambda device: torch.arange(value, end, 3, device=device)))
            case "like":
                self._add(_made(lambda device: torch.ones_like(pair.host, dtype=dtype, device=device)))
            case "add":
                _both(pair.cut(step), lambda tensor: tensor.copy_(tensor.long().add(1).to(tensor.dtype)))
                pair.doubtful = True
            case "compare" | "select" | "positions":
                self._derive(step, pair, other, value)
            case _:
                self._write(step, pair, other, value)

    def _derive(self, step: Step, pair: Pair, other: Pair, value: int) -> None:
        if step.action == "compare":
            value = value if _fits(value, pair.host.dtype) else 1
            compare = COMPARISONS[step.kind] if pair.host.dtype != torch.uint16 else operator.eq
            host = compare(pair.host.long(), value)
            self._add(Pair(compare(pair.device, value), host, pair.doubtful))
        elif not other.doubtful and other.host.dtype == torch.bool:
            if step.action == "positions":
                self._add(Pair(other.device.nonzero().view(-1), other.host.nonzero().view(-1)))
            elif len(other.host) == len(pair.host):
                self._add(Pair(pair.device[other.device], pair.host[other.host], pair.doubtful))

    def _write(self, step: Step, pair: Pair, other: Pair, value: int) -> None:
        into = pair.cut(step)
        match step.action:
            case "fill":
                value = value if _fits(value, pair.host.dtype) else 1
                _both(into, lambda tensor: tensor.fill_(value))
            case "zero":
                _both(into, torch.Tensor.zero_)
            case "fill_from":
                _copy(pair, into, Pair(other.device[-1], other.host[-1], other.doubtful))
            case "copy":
                length = min(len(into.host), len(other.host))
                shorter = Pair(into.device[:length], into.host[:length])
                _copy(pair, shorter, Pair(other.device[-length:], other.host[-length:], other.doubtful))
            case _:
                _copy(pair, into, _made(lambda device: torch.arange(len(into.host), device=device)))

    def _pick(self, number: int) -> Pair:
        return self.pairs[number % len(self.pairs)]

    def _add(self, pair: Pair) -> None:
        if len(pair.host) and len(self.pairs) % 2 == 0 and self.length < LARGE:
            whole = torch.empty(LARGE, dtype=pair.host.dtype, device="cuda")
            pair.device = whole[3 : 3 + len(pair.host)].copy_(pair.device)
        if len(pair.host):
            self.pairs.append(pair)
        del self.pairs[:-5]


def readings(tensor: torch.Tensor) -> Iterator[Callable[[torch.Tensor], Any]]:
    """Ways to read values of a tensor of this type."""
    if tensor.dtype != torch.uint16:  # of which torch computes little
        yield lambda x: [x.sum().item(), x.min().item(), x.max().item(), x.any().item(), x.all().item()]
    yield lambda x: [int(x[place].item()) for place in (0, len(x) // 3, -1)]
    yield lambda x: [int(one) for one in x[len(x) // 2 :][:5].tolist()]


def _made(make: Callable[[str], torch.Tensor]) -> Pair:
    return Pair(make("cuda"), make("cpu"))


def _both(pair: Pair, change: Callable[[torch.Tensor], object]) -> None:
    change(pair.device)
    change(pair.host)


def _copy(whole: Pair, into: Pair, source: Pair) -> None:
    """Copy into a view of ``whole``, which is doubtful afterwards if values were, or did not fit its type."""
    before = source.host.to(torch.int64, copy=True)  # the two may overlap
    into.device.copy_(source.device.clone())
    into.host.copy_(before)
    fits = into.host.dtype == torch.bool or bool((into.host.long() == before).all())
    whole.doubtful = whole.doubtful or source.doubtful or not fits


def _fits(value: int, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return value in (0, 1)
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
