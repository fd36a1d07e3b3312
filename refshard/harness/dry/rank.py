"""The process of one rank of a dry run. It imports torch only once the fake device is there."""

import os
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType

import msgspec

from refshard.dryrun.overheads import overheads
from refshard.dryrun.request import UNLIMITED_BYTES
from refshard.errors import RefshardError
from refshard.fakecuda import activate
from refshard.folders import replace_file
from refshard.harness.dry.result import ASKED_FILE, DryCase, DryResult, result_file
from refshard.specs.cluster import ClusterSpec, load_cluster


def run_dry_rank(folder: Path) -> int:
    """Run what ``folder`` asks for, leave the result there, and end this process."""
    asked = msgspec.json.decode((folder / ASKED_FILE).read_bytes(), type=DryCase)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = _run(asked, folder)
        except BaseException as error:  # of the device or of the reading: what the case meets is a result already
            traceback.print_exception(error)
            words = str(error) if isinstance(error, RefshardError) else f"{type(error).__name__}: {error}"
            result = DryResult(state="failed", error=(words.splitlines() or [""])[0])
    own = [str(warning.message) for warning in caught if "refshard" in str(warning.message)]
    result = msgspec.structs.replace(result, warnings=tuple(dict.fromkeys([*result.warnings, *own])))
    replace_file(result_file(folder), [msgspec.json.encode(result).decode()])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads, and tensors that outlive the device, have nothing left to say


def _run(asked: DryCase, folder: Path) -> DryResult:
    cluster = load_cluster(asked.case.cluster).of_world_size(asked.case.world_size)
    usable, ext = make_device(asked, cluster)
    take_place(asked.rank, asked.case.world_size, cluster.ranks_per_node)
    # Here, since torch must not be imported before the device is there.
    from refshard.harness.dry.steps import run_steps

    return msgspec.structs.replace(run_steps(asked, cluster, ext, folder), usable_bytes=usable)


def make_device(asked: DryCase, cluster: ClusterSpec) -> tuple[int, ModuleType]:
    """Give this process the case's GPUs: returns the bytes that the allocator may reserve, and the extension."""
    hardware, beside = cluster.accelerator, sum(one.bytes for one in overheads(asked.case.world_size))
    if not asked.limited:
        hardware = msgspec.structs.replace(hardware, memory_bytes=UNLIMITED_BYTES)
    ext = activate(hardware, devices=cluster.ranks_per_node, unusable_bytes=beside)
    return hardware.memory_bytes - beside, ext


def take_place(rank: int, world_size: int, ranks_per_node: int) -> None:
    """A rank's place in the world, instead of its place among the processes that were really started. Its process sees
    one GPU: torch plans DTensors on the first one, whatever a rank's own is.
    """
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }  # fmt: skip
