"""Small values that ranks exchange: each rank of a dry run runs alone, and reads what the others sent in their runs.

A rank hands its own inputs of every collective to the next runs, and takes the others' from the runs before. Where none
is known, the other rank is taken to have the same as this one. A rank that was given something else than the others
have in the end has to run again (:func:`unsettled`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

_SUM, _AVG, _PRODUCT, _MIN, _MAX = range(5)
"""``c10d::ReduceOp``, as far as it is computed here."""
_ROOTED = frozenset({"broadcast", "scatter"})


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """What a rank gave to its ``number``-th call in a group. ``sender`` and ``receiver`` are global ranks of a message,
    else -1; ``root`` is the rank that alone gives values, -1 where all do. ``parts`` are the bytes of its tensors; None
    where its values are not known.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    sender: int
    receiver: int
    root: int
    parts: tuple[bytes, ...] | None

    @property
    def key(self) -> tuple[object, ...]:
        """What all who take part call it."""
        return self.group, self.ranks, self.number, self.op.replace("recv", "send"), self.sender, self.receiver

    def givers(self, rank: int) -> tuple[int, ...]:
        """The other ranks whose values this one's result depends on."""
        givers = (self.sender,) if self.sender >= 0 else (self.root,) if self.root >= 0 else self.ranks
        return tuple(one for one in givers if one != rank)


Values = dict[int, tuple[Sent, ...]]
"""What each rank sent, by rank."""


def unsettled(rank: int, before: Values, now: Values) -> bool:
    """Whether the values of the others that a run of ``rank`` depends on are not those that it was given ``before``."""
    used, final = _by_key(before), _by_key(now)
    for sent in now.get(rank, ()):
        if sent.parts is None:
            continue
        for giver in sent.givers(rank):
            if used.get(giver, {}).get(sent.key, sent.parts) != final.get(giver, {}).get(sent.key, sent.parts):
                return True
    return False


def _by_key(values: Values) -> dict[int, dict[object, tuple[bytes, ...] | None]]:
    return {rank: {sent.key: sent.parts for sent in all_sent} for rank, all_sent in values.items()}


def read_values(path: Path) -> Values:
    """Read what :func:`write_values` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Values)


def write_values(values: Values, path: Path) -> None:
    """Write values for another process."""
    path.write_bytes(msgspec.msgpack.encode(values))


class Exchange:
    """Stands in for the other ranks of ``world_size`` in the process of ``rank``, by their ``values``."""

    def __init__(self, ext: ModuleType, rank: int, world_size: int, values: Values) -> None:
        self._ext, self._rank, self._world_size = ext, rank, world_size
        self._known = _by_key(values)
        self.sent: list[Sent] = []

    def install(self) -> None:
        """Exchange values until this process ends."""
        self._ext.set_exchange_callback(self._exchange)

    def _exchange(
        self, group: int, number: int, op: str, peer: int, root: int, reduces: int, out: "list[torch.Tensor]",
        given: "list[torch.Tensor] | None",
    ) -> bool:  # fmt: skip
        if op == "recv" and peer < 0:  # from anybody
            return False
        name, members = self._ext.groups()[group]
        ranks = tuple(members) or tuple(range(self._world_size))
        ends = (-1, -1)
        if peer >= 0:
            ends = (self._rank, ranks[peer]) if op == "send" else (ranks[peer], self._rank)
        source = ranks[root] if op in _ROOTED else -1
        takes = op == "recv" or (op == "broadcast" and source != self._rank)
        own = _bytes_of(out if takes else given)  # what it has as long as nobody sends anything
        sent = Sent(name, ranks, number, op, *ends, source, own)
        self.sent.append(sent)
        if own is None:
            return False
        parts = {one: self._known.get(one, {}).get(sent.key, own) for one in sent.givers(self._rank)}
        known = {one: each for one, each in parts.items() if each is not None}
        return len(known) == len(parts) and _receive(sent, self._rank, {**known, self._rank: own}, reduces, out)


def _receive(
    sent: Sent, rank: int, parts: Mapping[int, tuple[bytes, ...]], reduces: int, out: "Sequence[torch.Tensor]"
) -> bool:
    """Fill ``out`` with what a call gives from the ``parts`` of all ranks; whether they fit."""
    op, ranks = sent.op, sent.ranks
    if op == "send" or not out:
        return True
    if op in ("recv", "broadcast"):
        return _fill(out, parts[sent.sender if op == "recv" else sent.root])
    if op == "scatter":
        given, place = parts[sent.root], ranks.index(rank)
        return len(given) == len(ranks) and _fill(out, given[place : place + 1])
    given_by = [parts[one] for one in ranks]
    if op in ("all_gather", "gather"):
        if len(out) == len(ranks) and all(len(given) == 1 for given in given_by):
            return _fill(out, tuple(given[0] for given in given_by))
        return _fill(out, tuple(b"".join(pieces) for pieces in zip(*given_by)))
    if op in ("all_reduce", "reduce"):
        return _fill(out, _reduced(given_by, reduces, out))
    if op == "reduce_scatter" and len(out) == 1:
        place, size = ranks.index(rank), out[0].nbytes
        mine = [(b"".join(given)[place * size : (place + 1) * size],) for given in given_by]
        return _fill(out, _reduced(mine, reduces, out))
    return False


def _bytes_of(tensors: "Sequence[torch.Tensor] | None") -> tuple[bytes, ...] | None:
    import torch

    if tensors is None:
        return None
    flat = [tensor.detach().contiguous().reshape(-1) for tensor in tensors]
    return tuple(bytes(one.view(torch.uint8).numpy()) if one.numel() else b"" for one in flat)


def _tensor(data: bytes, like: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.frombuffer(bytearray(data), dtype=like.dtype)


def _fill(out: "Sequence[torch.Tensor]", parts: Sequence[bytes]) -> bool:
    import torch

    if [tensor.nbytes for tensor in out] != [len(part) for part in parts]:
        return False
    with torch.no_grad():
        for tensor, part in zip(out, parts):
            if part:
                tensor.copy_(_tensor(part, tensor).reshape(tensor.shape))
    return True


def _reduced(given: Sequence[tuple[bytes, ...]], reduces: int, out: "Sequence[torch.Tensor]") -> tuple[bytes, ...]:
    """The reduction of each tensor over the ranks; nothing if the operation or the sizes are others."""
    import torch

    if reduces > _MAX or any([len(part) for part in each] != [one.nbytes for one in out] for each in given):
        return ()
    found = []
    for place, like in enumerate(out):
        if not like.numel():
            found.append(b"")
            continue
        stacked = torch.stack([_tensor(each[place], like) for each in given])
        if reduces == _PRODUCT:
            total = stacked.prod(0)
        elif reduces in (_MIN, _MAX):
            total = stacked.amin(0) if reduces == _MIN else stacked.amax(0)
        else:
            total = stacked.sum(0)
            total = total / len(given) if reduces == _AVG else total
        found.append(_bytes_of([total.to(like.dtype)])[0])  # type: ignore[index]
    return tuple(found)
