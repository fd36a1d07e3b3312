"""Optimizers that need whole tensors: one rank owns each tensor, steps it whole, and keeps its state.

The user's optimizer class does not change: every rank makes one instance for each bucket of tensors that it owns.
Buckets are stepped one after another, so that only a few whole tensors exist at a time.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from refshard.engine.collectives import Collectives
from refshard.engine.exchange import Exchange, Owned
from refshard.engine.local_part import gatherable
from refshard.engine.owned_state import everyones_state, own_state, owned_part
from refshard.engine.owners import Flat, Group, Make, Place, assign_owners, members_of, options_of, prototype
from refshard.errors import EngineError


@final
class WholeTensors(torch.optim.Optimizer):
    """An optimizer of sharded parameters that steps whole tensors, each on its owner.

    ``param_groups`` hold the model's parameters and the options of the optimizer of class ``made``; they count at each
    step. ``state`` has a tensor's state on its owner, and an empty dictionary on other ranks. ``step``, ``state_dict``
    and ``load_state_dict`` are collective: every rank calls them.
    """

    made: type[torch.optim.Optimizer]

    def __init__(
        self,
        make: Make,
        parameters: Iterable[Any],
        options: dict[str, Any],
        places: Sequence[Place],
        collectives: Collectives,
    ) -> None:
        self._complete = False
        super().__init__(parameters, {})
        self.collectives = collectives
        flats = members_of(self.param_groups, places, collectives)
        self.members = tuple(member for _, members in flats for member in members)
        self._adopt(prototype(make, self.param_groups, self.members, options))
        self._buckets = [
            _Bucket(self, make, options, bucket, collectives) for bucket in assign_owners(flats, collectives.world_size)
        ]
        self._complete = True
        self.register_state_dict_post_hook(_show_state)
        self.register_load_state_dict_pre_hook(_keep_own_state)
        self.register_load_state_dict_post_hook(_place_own_state)

    def _adopt(self, prototype: torch.optim.Optimizer) -> None:
        """Take over the options that ``prototype`` has found for each group, and for which parameters it has state."""
        self.made, self.defaults = type(prototype), prototype.defaults
        for group, made in zip(self.param_groups, prototype.param_groups):
            group.update(options_of(made))
        for member in self.members:
            if member.tensor in prototype.state:
                self.state[member.parameter] = {}

    def add_param_group(self, param_group: Group) -> None:
        """For torch's own constructor only.

        Raises:
            EngineError: the owners of all tensors are chosen already.
        """
        if self._complete:
            raise EngineError(
                f"whole_tensors({self.made.__name__}): a parameter group cannot be added, because tensors are "
                "assigned to ranks when it is built; rebuild it over all groups"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        """A copy would step the original's tensors, or none.

        Raises:
            EngineError: always; ``copy.deepcopy`` and ``pickle`` come here.
        """
        raise EngineError(
            f"whole_tensors({self.made.__name__}) cannot be copied or pickled; build another one over the model, and "
            "load this one's state_dict()"
        )

    @_disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes seconds
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; collective. Returns what ``closure`` does.

        The next bucket's tensors are on their way while one bucket is stepped, and so are the last one's parts.

        Raises:
            EngineError: the ranks have gradients of different parameters, or the optimizer cannot be split by tensors.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_agreement()
        turns = [bucket for bucket in self._buckets if bucket.present]
        returning: _Bucket | None = None
        for bucket in turns[:1]:
            bucket.bring()
        for bucket, following in zip(turns, [*turns[1:], None]):
            bucket.arrive()
            if following is not None:
                following.bring()
            bucket.step(self)
            bucket.send_back()
            if returning is not None:
                returning.land()
            returning = bucket
        if returning is not None:
            returning.land()
        return loss

    def everyones_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """``state`` on every rank; its tensors are parts, with all elements on their owner; collective.

        Raises:
            EngineError: state is a container of tensors.
        """
        return everyones_state(self.members, self.state, self.collectives)

    def room(self, parameter: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to read state of a parameter to, on every rank: the one that is there, or a new one if unlike it."""
        member = next(m for m in self.members if m.parameter is parameter)
        held = self.state.get(parameter, {}).get(key)
        alike = isinstance(held, torch.Tensor) and (held.shape, held.dtype) == (shape, dtype) and held.is_contiguous()
        if member.whole is None:
            return held if alike else torch.empty(shape, dtype=dtype, device=parameter.device)
        local = held.detach().view(-1) if alike else None
        return owned_part(key, member, shape, dtype, member.tensor.device, self.collectives, local)

    def _check_agreement(self) -> None:
        sharded = [member for member in self.members if member.whole is not None]
        named = repr([(m.whole.name, m.group) for m in sharded if m.whole is not None and m.present])
        if sharded and not self.collectives.agree(zlib.crc32(named.encode())):
            raise EngineError(
                f"rank {self.collectives.world_rank} steps other parameters than another rank does; all ranks must "
                "give whole_tensors the same parameters, and use the same ones in every step, if need be by adding "
                "0 * parameter.sum() to the loss"
            )


@final
class _Bucket:
    """Tensors that are stepped together, by one optimizer on each rank that owns some of them."""

    def __init__(
        self,
        outer: WholeTensors,
        make: Make,
        options: dict[str, Any],
        flats: Sequence[Flat],
        collectives: Collectives,
    ) -> None:
        self._members = [member for _, members in flats for member in members]
        self._own = [m for m in self._members if m.whole is None or m.owner == collectives.rank]
        self._exchanges = [
            Exchange(place.unit, members, collectives, place.device)
            for place, members in flats
            if members[0].whole is not None
        ]
        self._groups = sorted({member.group for member in self._own})
        self._inner: torch.optim.Optimizer | None = None
        self._first = True
        if self._own:
            given = [
                {**options_of(outer.param_groups[i]), "params": [m.tensor for m in self._own if m.group == i]}
                for i in self._groups
            ]
            self._inner = make(given, **options)
            for member in self._own:
                if member.tensor in self._inner.state:  # what the constructor has made
                    outer.state[member.parameter] = self._inner.state[member.tensor]

    @property
    def present(self) -> bool:
        """Whether a tensor has a gradient."""
        return any(member.present for member in self._members)

    def bring(self) -> None:
        for exchange in self._exchanges:
            exchange.bring()

    def arrive(self) -> None:
        for exchange in self._exchanges:
            exchange.arrive()

    def send_back(self) -> None:
        for exchange in self._exchanges:
            exchange.send_back()

    def land(self) -> None:
        for exchange in self._exchanges:
            exchange.land()

    def step(self, outer: WholeTensors) -> None:
        """Step what this rank owns, with the options and the state that ``outer`` has now."""
        for member in self._members:
            if member.present:
                outer.state.setdefault(member.parameter, {})  # on all ranks, so that all have state or none has
        present = [member for member in self._own if member.present]
        if self._inner is None or not present:
            return
        for group, index in zip(self._inner.param_groups, self._groups):
            group.update(options_of(outer.param_groups[index]))
        for member in present:
            self._inner.state[member.tensor] = outer.state[member.parameter]
        issued = _issued()
        self._inner.step()
        if self._first and _issued() != issued:
            raise EngineError(
                f"whole_tensors: {outer.made.__name__} communicates in a step, but each rank steps only its tensors; "
                "use its single-device version"
            )
        self._first = False
        for member in present:
            outer.state[member.parameter] = self._inner.state[member.tensor]
        for group, index in zip(self._inner.param_groups, self._groups):
            _check_unchanged(outer, group, outer.param_groups[index])


def _check_unchanged(outer: WholeTensors, group: Group, ours: Group) -> None:
    for key, value in options_of(group).items():
        if value is not ours.get(key):
            raise EngineError(
                f"whole_tensors: {outer.made.__name__} changes '{key}' of its parameter groups in a step (from "
                f"{ours.get(key)} to {value}), so ranks would diverge; use an optimizer with per-tensor state"
            )


def _issued() -> int:
    """How many collectives the default process group has issued; 0 where that is not known."""
    group: Any = dist.group.WORLD
    with suppress(RuntimeError):  # of a backend that does not count
        return 0 if group is None else int(group._get_sequence_number_for_group())
    return 0


def _numbered(optimizer: "WholeTensors") -> list[Owned]:
    """The members in the order in which state dicts number parameters."""
    member_of = {member.parameter: member for member in optimizer.members}
    return [member_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _show_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Every member's state, on every rank, in the form that torch's state-dict functions gather."""
    assert isinstance(optimizer, WholeTensors)
    found = optimizer.everyones_state()
    state = {
        index: {key: gatherable(value) for key, value in found[member.parameter].items()}
        for index, member in enumerate(_numbered(optimizer))
        if member.parameter in found
    }
    return {**state_dict, "state": state}


def _keep_own_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Reduce loaded state to what each rank owns."""
    assert isinstance(optimizer, WholeTensors)
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = dict(state_dict["state"])
    for number, member in zip(numbers, _numbered(optimizer)):
        if number in state and member.whole is not None:
            state[number] = own_state(member, state[number], optimizer.collectives)
    return {**state_dict, "state": state}


def _place_own_state(optimizer: torch.optim.Optimizer) -> None:
    """State is kept where it is computed with, which torch takes to be where the parameter is."""
    assert isinstance(optimizer, WholeTensors)
    for member in optimizer.members:
        for key, value in optimizer.state.get(member.parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                optimizer.state[member.parameter][key] = value.to(member.tensor.device)
