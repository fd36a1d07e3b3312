"""One rank that describes its machine instead of running a case; one of each host does, for all of them."""

import os
from pathlib import Path

import msgspec

from refshard.measure.environment import capture_environment

ASKED = "environment.json"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """With how many threads to measure the rate of a matrix product; and in words what joins the hosts."""

    threads: int
    network: str = ""


def described_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`Environment`."""
    return folder / f"environment-rank{rank}.json"


def describe_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    if int(os.environ["LOCAL_RANK"]) == 0:
        asked = msgspec.json.decode((folder / ASKED).read_bytes(), type=Asked)
        described = msgspec.json.encode(capture_environment(asked.threads, asked.network))
        described_file(folder, int(os.environ["RANK"])).write_bytes(described)
    return 0
