"""Recordings made by hand, with memory that is touched and handed out.

>>> made = Touching()
>>> made.write(stream=20)
0
>>> made.order(before=20, after=0)
>>> made.read(stream=0)
3
"""

from refshard.dryrun.recording import Category, Kind
from tests.dryrun.made import Made

WEIGHT = 0x1000
"""The address that is touched unless another is given."""
NBYTES = 1024
MAIN, GATHER, REDUCE = 0, 20, 21
"""Streams."""


class Touching(Made):
    """Operators that touch one piece of memory, named by what they do on which stream."""

    def write(self, stream: int, address: int = WEIGHT, nbytes: int = NBYTES, name: str = "") -> int:
        """An operator that writes."""
        return self.launch(name or f"write on {stream}", stream=stream, accesses=[(address, nbytes, True)])

    def read(self, stream: int, address: int = WEIGHT, nbytes: int = NBYTES, name: str = "") -> int:
        """An operator that reads."""
        return self.launch(name or f"read on {stream}", stream=stream, accesses=[(address, nbytes, False)])

    def hand_out(
        self, address: int = WEIGHT, nbytes: int = NBYTES, stream: int = MAIN, category: Category = Category.OTHER,
        name: str = "allocate",
    ) -> None:  # fmt: skip
        """A block that lies at this address."""
        self._add(Kind.ALLOCATE, name, streams=stream, reads=address, sizes=nbytes, categories=int(category))

    def give_back(self, address: int = WEIGHT, nbytes: int = NBYTES, stream: int = MAIN) -> None:
        """Free the block that lies at this address."""
        self._add(Kind.FREE, "free", streams=stream, reads=address, sizes=nbytes)

    def order(self, before: int, after: int) -> None:
        """Let what comes on one stream wait for what came on another."""
        self.wait(after, self.record(before))
