"""The simulated allocator for recordings made by hand: what ``refshard.dryrun`` needs of the device's extension.

The allocator is the real one, built alone. Streams as the host knows them are written a second time here, naively.
"""

from types import ModuleType, SimpleNamespace
from typing import Any, cast

from tests.fakecuda.allocator_build import allocator_module
from tests.fakecuda.allocator_device import BASE, SPAN

Item = tuple[int, int]
"""A stream, and how many things it had been asked for."""


def extension(conf: str = "") -> ModuleType:
    """Stands for the extension of a device whose allocator is configured by ``conf``; all of its memory is usable."""
    module = allocator_module()

    class Streams(module.Progress):  # type: ignore[name-defined, misc]
        """Each thing on a stream has a set of all that must have run before it. The host has one too."""

        def __init__(self) -> None:
            super().__init__()
            self.asked: dict[int, list[set[Item]]] = {}
            self.events: dict[int, set[Item]] = {}
            self.host: set[Item] = set()

        def _add(self, stream: int, before: set[Item]) -> set[Item]:
            items = self.asked.setdefault(stream, [])
            items.append((items[-1] if items else set()) | before | {(stream, len(items) + 1)})
            return items[-1]

        def launched(self, stream: int) -> None:
            self._add(stream, set())

        def record(self, stream: int, event: int) -> None:
            self.events[event] = self._add(stream, set())

        def wait(self, stream: int, event: int) -> None:
            self._add(stream, self.events.get(event, set()))

        def host_waits_for_stream(self, stream: int) -> None:
            self.host |= self.asked.get(stream, [set()])[-1]

        def host_waits_for_event(self, event: int) -> None:
            self.host |= self.events.get(event, set())

        def synchronise(self) -> None:
            for stream in self.asked:
                self.host_waits_for_stream(stream)

        def position(self, stream: int) -> int:
            return len(self.asked.get(stream, []))

        def passed(self, stream: int, ticket: int) -> bool:
            return ticket == 0 or (stream, ticket) in self.host

    def allocator_like(device: int, progress: Any, on_segment: Any, total: int, expandable: bool | None = None) -> Any:
        assert device == 0
        settings = conf if expandable is None else f"expandable_segments:{expandable}"
        return module.CachingAllocator(
            progress, base=BASE, span=SPAN, capacity=total, settings=settings, on_segment=on_segment, device_total=total
        )  # fmt: skip

    found = SimpleNamespace(Progress=module.Progress, Streams=Streams, allocator_like=allocator_like)
    return cast(ModuleType, found)
