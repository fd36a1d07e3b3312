"""Executes the ops: the only place where collectives are issued and awaited, and where lanes are ordered.

Six waits between lanes make it correct; a comment at each says why it is needed. The seventh, of the host, is for
masters in host memory.
"""

import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from refshard.engine.buffers import Slot
from refshard.engine.collectives import Collectives, Pending, Together, failed
from refshard.engine.device import Lane, Lanes
from refshard.engine.flat import FlatParameter, Unclaimed
from refshard.engine.labels import label, mark
from refshard.engine.schedule import Op, OpKind, Phase, Presence
from refshard.engine.unit import Unit
from refshard.errors import EngineError


class Effects:
    """Executes single ops. ``reducing`` lists units with a reduction in flight, oldest first.

    While it is ``agreeing``, the ranks check before each collective of a unit that all issue the same one.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, lanes: Lanes) -> None:
        self._units = tuple(units)
        self._collectives = collectives
        self._lanes = lanes
        self._compute_so_far: object = None
        self._newly_released = False
        self._awaited: dict[int, int] = {}
        self._host_memory_in_use = False
        self.reducing: list[int] = []
        self.agreeing = False
        self._combined: set[int] = set()
        self._reducing_together = _by_collectives(self._units)
        self._all_used: dict[Collectives, torch.Tensor] = {}
        self._of: dict[OpKind, Callable[[Unit], None]] = {
            OpKind.WAIT: self._wait,
            OpKind.RELEASE: self._release,
            OpKind.REDUCE: self._reduce,
            OpKind.COMBINE: self._combine,
            OpKind.FINISH: self._finish,
        }

    def of(self, op: Op) -> Callable[[], None]:
        """What ``op`` says, ready to be done any number of times."""
        unit = self._units[op.unit]
        if op.kind is OpKind.BEGIN:
            return partial(self._begin, unit, op.phase)
        if op.kind is OpKind.END:
            return partial(self._end, unit, op.phase)
        if op.kind is OpKind.GATHER:
            return partial(self._gather, unit, op.phase)
        return partial(self._of[op.kind], unit)

    def execute(self, op: Op) -> None:
        """Do what ``op`` says."""
        self.of(op)()

    def masters_changed(self, units: Iterable[Unit]) -> None:
        """A pass begins: what the optimizer wrote must be there before a gather of ``units`` reads it (first wait)."""
        self._wait_for_compute("gather")
        self._lanes.alone()
        self._newly_released = False  # All that compute read so far is over then, too.
        self._awaited.update((unit.index, unit.version) for unit in units)

    def settle(self) -> None:
        """A pass has ended: masters and gradients in the host's memory are the host's again.

        Compute has awaited all that copied from them or to them, and the host awaits compute (seventh wait): an
        optimizer there writes and reads by the host's time.
        """
        if self._host_memory_in_use:
            self._host_memory_in_use = False
            self._lanes.synchronise(self._lanes.record("compute"))

    def finish(self, unit: Unit) -> None:
        """Bring a unit's reduction to its end, if one is under way."""
        if unit.gradients.reducing is None:
            return
        if unit.facts.legs == 2 and unit.index not in self._combined:
            self._combine(unit)
        self._finish(unit)

    def reduce_rest(self, units: Iterable[Unit]) -> None:
        """Reduce gradients of ``units`` from earlier microbatches that this backward did not reach; end every
        reduction.
        """
        for unit in units:
            if unit.gradients.filled and unit.gradients.reducing is None:
                self._reduce(unit)
        for index in tuple(self.reducing):
            self.finish(self._units[index])

    def claim_gradients(self, units: Sequence[Unit]) -> None:
        """All reductions of ``units`` have ended: give parameters that only other ranks have used their gradients.

        The ranks tell each other which parameters they have used, in one small collective of those that reduce
        together. The host waits only on a rank that has not used all.
        """
        if not units:
            return
        self._agree("the end of backward", -1)
        left: dict[str, list[Unclaimed]] = {}
        for claim in (claim for unit in units for claim in unit.gradients.unclaimed):
            left.setdefault(claim.parameter.layout.name, []).append(claim)
        unused = left.keys() - {name for unit in units if left for name in unit.gradients.arrived}
        for collectives, of in self._reducing_together.items():
            lane: Lane = "combine" if collectives.legs == 2 else "reduce"
            names = [parameter.layout.name for unit in of for parameter in unit.trained]
            used = self._used(collectives, names, unused)
            # What this rank tells must be there before it is sent.
            self._wait_for_compute(lane)
            try:
                with self._lanes.use(lane):
                    told = self._lanes.issued(lane, collectives.all_reduce_max(used))
                told.wait()
            except RuntimeError as error:
                raise failed(error, "all_reduce of which parameters were used", collectives.world_rank) from error
            for name, by_any in zip(names, used.tolist()) if left else ():
                for claim in left.get(name, ()) if by_any else ():
                    claim.flat.accept(claim.parameter, claim.part, foreign=False)
        for unit in units:
            unit.gradients.unclaimed.clear()

    def _used(self, collectives: Collectives, names: Sequence[str], unused: Container[str]) -> torch.Tensor:
        """Which parameters this rank has used: all but ``unused`` ones. All of them are the same tensor each time,
        since the host would wait for a new one's way to the device.
        """
        if any(name in unused for name in names):
            return torch.tensor([n not in unused for n in names], dtype=torch.uint8, device=collectives.device)
        ones = self._all_used.get(collectives)
        if ones is None or len(ones) != len(names):
            ones = torch.ones(len(names), dtype=torch.uint8, device=collectives.device)
            self._all_used[collectives] = ones
        return ones

    def _agree(self, what: str, index: int) -> None:
        """Raise an error if another rank is about to issue another collective; only while ``agreeing``."""
        if self.agreeing and not self._collectives.agree(zlib.crc32(f"{what} {index}".encode())):
            of = f" of unit '{self._units[index].name}'" if index >= 0 else ""
            raise EngineError(
                f"rank {self._collectives.world_rank} is at {what}{of}, and another rank is not; all ranks must run "
                "the same units in the same order: choose what runs by a seed that they share"
            )

    def abandon(self, unit: Unit, *, keep_gradients: bool, keep_ahead: bool) -> None:
        """Give up what is under way of a unit: see :meth:`Unit.abandon`."""
        gathering = None if unit.ahead and keep_ahead else unit.gathering
        for pending in (gathering, unit.gradients.reducing):
            if pending is not None:
                # Nobody will use its result; if it failed, the next collective says so.
                with suppress(RuntimeError):
                    pending.wait()
        unit.abandon(keep_gradients=keep_gradients, keep_ahead=keep_ahead)
        self._newly_released = True
        if unit.index in self.reducing:
            self.reducing.remove(unit.index)
            self._combined.discard(unit.index)

    def _gather(self, unit: Unit, phase: Phase) -> None:
        unit.ahead = False  # The pass gives it up when it has used it.
        if not (unit.current or (phase == "forward" and unit.written_unseen)):
            self._fetch(unit)

    def _fetch(self, unit: Unit) -> None:
        self._release(unit)
        self._evict(unit.slot)
        self._agree("the gather", unit.index)
        extended = any(flat.extended for flat in unit.flats)
        written = unit.written_unseen or self._awaited.get(unit.index) != unit.version
        if self._newly_released or extended or written:
            # What compute did last with this storage must be over before it is written again (second wait), and what
            # it may have written to the masters since the pass began must be there. Scales that parameters' hooks made
            # in an earlier gather, and that compute has read, may be freed, and their memory be taken by the coming
            # hooks.
            self._wait_for_compute("gather")
            self._newly_released, self._awaited[unit.index] = False, unit.version
        with label("all_gather", unit.name), self._lanes.use("gather"):
            unit.slot.acquire(unit.name)
            pairs = [(full, self._source(flat, full)) for flat, full in zip(unit.flats, unit.slot.flats)]
            works = (unit.collectives.all_gather(full, shard) for full, shard in pairs)
            unit.start_gather(self._issue("gather", "all_gather", unit, works))

    def _evict(self, slot: Slot) -> None:
        """Release units that were gathered ahead into slots that overlap this one."""
        for other in self._units if not slot.free else ():
            if other.ahead and other.slot.overlaps(slot):
                self._release(other)

    def _source(self, flat: FlatParameter, full: torch.Tensor) -> torch.Tensor:
        """What is gathered into ``full``: the shard, or its copy in the place where it belongs."""
        if flat.offloaded:
            self._host_memory_in_use = True
        elif flat.shard.dtype == full.dtype and not flat.extended:
            return flat.shard
        own = full[flat.own]
        if flat.extended:
            flat.pack(own)
            return own
        return own.copy_(flat.shard, non_blocking=True)

    def _wait(self, unit: Unit) -> None:
        if unit.gathering is None:  # Aliased, or gathered ahead and awaited already.
            return
        # Compute must not read what has not arrived (third wait).
        self._await(unit.gathering, "all_gather", unit)
        unit.finish_gather()

    def _begin(self, unit: Unit, phase: Phase) -> None:
        mark(phase, unit.name)
        if phase == "backward":
            # A second part of its backward: the slot still holds what the first part left there.
            self.finish(unit)
        if (phase == "forward" and unit.written_unseen) or (unit.presence is Presence.UNSHARDED and not unit.current):
            # Its weights were written to since they were gathered, as a model's forward may do with a teacher's; or
            # they may have been.
            self._fetch(unit)
            self._wait(unit)
        unit.begin(phase)

    def _end(self, unit: Unit, phase: Phase) -> None:
        mark("leave", unit.name)
        unit.end(phase)

    def _release(self, unit: Unit) -> None:
        if unit.presence is not Presence.SHARDED and not unit.aliased:
            self._wait(unit)
            unit.release()
            self._newly_released = True

    def _reduce(self, unit: Unit) -> None:
        if not unit.gradients.wanted and not unit.gradients.filled:
            return
        self._agree("the reduction", unit.index)
        # Gradients that are still where autograd has put them may have come, and be allocated, on several streams.
        self._lanes.join()
        if not unit.gradients.slot.accumulates:
            self._evict(unit.gradients.slot)
        with label("copy_in", unit.name):
            unit.gradients.complete()
        self._lanes.fork()
        with label("reduce_scatter", unit.name):
            slot = unit.gradients.slot
            given = [
                (flat.open_target(full, needs_slot_free=unit.facts.legs == 2), full, scratch)
                for flat, full, scratch in zip(unit.gradients.flats, slot.flats, slot.scratch)
            ]
            # Every gradient must be in the slot before it is reduced (fourth wait).
            self._wait_for_compute("reduce")
            with self._lanes.use("reduce"):
                works = (unit.collectives.reduce_scatter(*tensors) for tensors in given)
                unit.gradients.reducing = self._issue("reduce", _reduction(unit), unit, works)
        self.reducing.append(unit.index)

    def _combine(self, unit: Unit) -> None:
        # A second part of its backward may have ended this one.
        if unit.gradients.reducing is None or unit.index in self._combined:
            return
        # The second leg reads what the first has written (fifth wait). It has a lane of its own: the replicas may be
        # far away, and the next unit's first leg need not queue behind it.
        self._lanes.follow("combine", unit.gradients.reducing)
        self._await(unit.gradients.reducing, "reduce_scatter", unit)
        self._release_gradients(unit)
        targets = [flat.target for flat in unit.gradients.flats if flat.target is not None]
        with label("all_reduce", unit.name), self._lanes.use("combine"):
            works = (unit.collectives.all_reduce(target) for target in targets)
            unit.gradients.reducing = self._issue("combine", "all_reduce", unit, works)
        self._combined.add(unit.index)

    def _finish(self, unit: Unit) -> None:
        if unit.gradients.reducing is None:
            return
        # The optimizer reads the result, and the next unit writes its gradients over what was sent (sixth wait).
        self._await(unit.gradients.reducing, "all_reduce" if unit.index in self._combined else _reduction(unit), unit)
        unit.gradients.reducing = None
        self.reducing.remove(unit.index)
        for flat, full in zip(unit.gradients.flats, unit.gradients.slot.flats):
            unit.gradients.unclaimed += flat.take_reduced(full, unit.gradients.filled)
            self._host_memory_in_use |= flat.offloaded
        unit.gradients.filled.clear()
        if unit.index in self._combined:
            self._combined.discard(unit.index)
        else:
            self._release_gradients(unit)

    def _release_gradients(self, unit: Unit) -> None:
        unit.gradients.slot.release()
        self._newly_released |= not unit.gradients.slot.accumulates

    def _wait_for_compute(self, lane: Lane) -> None:
        self._compute_so_far = self._lanes.record("compute", self._compute_so_far)
        self._lanes.wait(lane, self._compute_so_far)

    def _issue(self, lane: Lane, collective: str, unit: Unit, calls: Iterator[Pending]) -> Pending:
        try:
            works = tuple(calls)
            return self._lanes.issued(lane, works[0] if len(works) == 1 else Together(works))
        except RuntimeError as error:
            raise self._failed(collective, unit, error) from error

    def _await(self, pending: Pending, collective: str, unit: Unit) -> None:
        try:
            with label("wait", unit.name):
                pending.wait()
        except RuntimeError as error:
            raise self._failed(collective, unit, error) from error

    def _failed(self, collective: str, unit: Unit, error: RuntimeError) -> Exception:
        return failed(error, f"{collective} of unit '{unit.name}'", self._collectives.world_rank)


def _by_collectives(units: Iterable[Unit]) -> dict[Collectives, list[Unit]]:
    """Those of which several ranks reduce gradients."""
    found: dict[Collectives, list[Unit]] = {}
    for unit in units:
        if unit.collectives.world_size * unit.collectives.replicas > 1:
            found.setdefault(unit.collectives, []).append(unit)
    return found


def _reduction(unit: Unit) -> str:
    """What reducing amounts to, where nothing is sharded too."""
    return "reduce_scatter" if unit.collectives.world_size > 1 else "all_reduce"
