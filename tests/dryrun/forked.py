"""Dry runs of many cases, each in a process that is forked from one that has the fake device and torch already."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from refshard.harness.dry.rank import make_device, take_place
from refshard.harness.dry.result import DryCase, DryResult, ranks_of
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import load_cluster

_ASKED, _RESULT = "asked.json", "result.json"


def run_forked(cases: Sequence[CaseSpec]) -> list[DryResult]:
    """Results of these cases, all of one cluster and world size, without a limit of memory or cuBLAS's workspaces."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / _ASKED).write_bytes(msgspec.json.encode(cases))
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":0:0", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "tests.dryrun.forked", name], env=environment, check=True)
        paths = [folder / str(index) / "rank0" / _RESULT for index in range(len(cases))]
        return [msgspec.json.decode(path.read_bytes(), type=DryResult) for path in paths]


def main(folder: Path) -> None:
    """Run the cases in ``folder`` one after another."""
    cases = msgspec.json.decode((folder / _ASKED).read_bytes(), type=list[CaseSpec])
    cluster = load_cluster(cases[0].cluster).of_world_size(cases[0].world_size)
    _, extension = make_device(DryCase(case=cases[0], rank=0, limited=False), cluster)
    # Before any fork, so that no case imports them again.

    from refshard.harness.dry.steps import run_steps

    for index, case in enumerate(cases):
        assert ranks_of(case) == (0,), "one rank stands for all"
        own = folder / str(index) / "rank0"
        own.mkdir(parents=True)
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0, case.name
            continue
        take_place(0, case.world_size, cluster.ranks_per_node)
        result = run_steps(DryCase(case=case, rank=0, limited=False), cluster, extension, own)
        (own / _RESULT).write_bytes(msgspec.json.encode(result))
        os._exit(0)  # threads, and tensors that outlive the device, have nothing left to say


if __name__ == "__main__":
    main(Path(sys.argv[1]))
