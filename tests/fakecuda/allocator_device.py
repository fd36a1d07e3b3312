"""The simulated caching allocator on streams that tests move on by hand."""

from tests.fakecuda.allocator_build import allocator_module

BASE = 1 << 44
SPAN = 1 << 43


class Clock:
    """Streams that are asked for things, and come as far as they are let."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}
        self.done: dict[int, int] = {}

    def launch(self, stream: int) -> None:
        self.asked[stream] = self.asked.get(stream, 0) + 1

    def position(self, stream: int) -> int:
        return self.asked.get(stream, 0)

    def passed(self, stream: int, ticket: int) -> bool:
        return self.done.get(stream, 0) >= ticket

    def come_to(self, stream: int, ticket: int) -> None:
        self.done[stream] = min(max(self.done.get(stream, 0), ticket), self.asked.get(stream, 0))

    def synchronise(self) -> None:
        self.done = dict(self.asked)


class Device:
    """The allocator under test, its streams, and what it told of segments. Sizes are bytes."""

    def __init__(self, capacity: int = 0, conf: str = "", total: int = 0) -> None:
        module = allocator_module()
        clock = self.clock = Clock()

        class Progress(module.Progress):  # type: ignore[name-defined, misc]
            def position(self, stream: int) -> int:
                return clock.position(stream)

            def passed(self, stream: int, ticket: int) -> bool:
                return clock.passed(stream, ticket)

            def synchronise(self) -> None:
                clock.synchronise()

        self.segments: list[int] = []
        self.allocator = module.CachingAllocator(
            Progress(), base=BASE, span=SPAN, capacity=capacity, settings=conf, on_segment=self.segments.append,
            device_total=total,
        )  # fmt: skip
        self.out_of_memory: type[Exception] = module.OutOfMemory

    def allocate(self, size: int, stream: int = 0) -> int:
        """The address, counted from the first."""
        return int(self.allocator.allocate(size, stream)[0]) - BASE

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.allocator.free(BASE + address)

    def current(self, name: str, pool: str = "all") -> int:
        return int(self.allocator.statistics()[name][pool]["current"])

    @property
    def reserved(self) -> int:
        return self.current("reserved_bytes")

    def layout(self) -> list[tuple[int, int, str, int]]:
        blocks = [block for segment in self.allocator.snapshot() for block in segment["blocks"]]
        return [(b["address"], b["size"], b["state"], b["requested_size"]) for b in blocks]
