"""On an H200, torch 2.11's caching allocator takes the lowest of several free blocks of one size.

torch 2.13 takes the one of the oldest segment (``tests/fakecuda/torch_allocator.json``), and so does the fake
device. On the H200 each new large segment lay below the one before, so the two rules choose differently.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from refshard.quantities import MIB

RECORDED = Path(__file__).parents[2] / "profiles" / "recorded" / "h200" / "allocations.json.gz"


@pytest.fixture(scope="module")
def histories() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return found


@dataclass(eq=False, slots=True)
class Block:
    """Memory of the segment ``number``."""

    address: int
    size: int
    number: int
    stream: int
    free: bool = True


class Allocator:
    """Blocks by address; ``oldest`` takes the oldest segment's block of several of one size, else the lowest."""

    def __init__(self, *, oldest: bool) -> None:
        self.blocks: dict[int, Block] = {}
        self.ends: dict[int, Block] = {}
        self.oldest, self.segments = oldest, 0
        self.small: set[int] = set()

    def add(self, block: Block) -> None:
        self.blocks[block.address] = self.ends[block.address + block.size] = block

    def segment(self, address: int, size: int, stream: int) -> None:
        self.segments += 1
        if size == 2 * MIB:
            self.small.add(self.segments)
        self.add(Block(address, size, self.segments, stream))

    def choose(self, asked: int, stream: int) -> tuple[int, int]:
        """The address of the block for ``asked`` bytes and the size that it takes; address 0 without one."""
        size = max(512, -(-asked // 512) * 512)
        fitting = [
            (block.size, block.number if self.oldest else 0, block.address)
            for block in self.blocks.values()
            if block.free
            and block.stream == stream
            and block.size >= size
            and (block.number in self.small) == (size <= MIB)
        ]
        return (min(fitting)[2] if fitting else 0), size

    def hold(self, address: int, size: int) -> None:
        block = self.blocks[address]
        rest = block.size - size
        if rest >= 512 if block.number in self.small else rest > MIB:
            block.size = size
            self.add(Block(address + size, rest, block.number, block.stream))
            self.ends[address + size] = block
        block.free = False

    def release(self, address: int) -> None:
        block = self.blocks[address]
        block.free = True
        after, before = self.blocks.get(address + block.size), self.ends.get(address)
        if after and after.free and after.number == block.number:
            del self.blocks[after.address], self.ends[address + block.size]
            block.size += after.size
        if before and before.free and before.number == block.number:
            del self.blocks[address], self.ends[address]
            before.size += block.size
            block = before
        self.ends[block.address + block.size] = block


def misplaced(history: list[Any], *, oldest: bool) -> int:
    """How many allocations the rule puts elsewhere; each is then held where it was."""
    allocator = Allocator(oldest=oldest)
    count = 0
    for action, address, nbytes, stream in history:
        if action == "segment_alloc":
            allocator.segment(address, nbytes, stream)
        elif action == "alloc":
            chosen, size = allocator.choose(nbytes, stream)
            count += chosen != address
            allocator.hold(address, size)
        elif action == "free_completed":
            allocator.release(address)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1b-ddp", "1b-plain", "1b-fsdp2-full"])
def test_torch_2_11_takes_the_lowest_of_equal_blocks(histories: dict[str, list[Any]], case: str) -> None:
    assert misplaced(histories[case], oldest=False) == 0
    assert misplaced(histories[case], oldest=True) > 0
