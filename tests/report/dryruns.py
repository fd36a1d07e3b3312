"""Dry runs made by hand: two steps as FSDP2 issues them, with memory, a host synchronisation and a doubt."""

from dataclasses import replace
from typing import Any

from refshard.dryrun.analyse import Analysis, analyse
from refshard.dryrun.price import Doubt
from refshard.dryrun.recording import Category, Phase
from refshard.dryrun.request import Answer, Pool, Request
from refshard.dryrun.run import DryRun
from refshard.specs.cluster import load_cluster
from tests.dryrun.made import Made, sharded_step

MIB, GIB = 2**20, 2**30
SITE = "train.py:31 in train"


def trained(module: str = "layers.0.mlp", operator: str = "aten::mm") -> Made:
    """Two steps; the peak, of 17 GiB, is in the second one's backward. 20 GiB are reserved."""
    made = Made()
    group = made.group(range(8))
    made.segment(20 * GIB)
    made.communicator(group, 558 * MIB)
    made.allocate(4 * GIB, Category.PARAMETERS)
    optimizer = 0
    for step in range(2):
        made.phase, made.module = Phase.FORWARD, module
        made.launch(operator, writes=GIB)
        held = [made.allocate(2 * GIB, Category.UNSHARDED), made.allocate((4 + step) * GIB, name=operator)]
        made.phase = Phase.BACKWARD
        made.launch(operator, writes=GIB)
        held.append(made.allocate(2 * GIB, Category.GRADIENTS))
        for block in held:
            made.free(block)
        optimizer = optimizer or made.allocate(4 * GIB, Category.OPTIMIZER)
        sharded_step(made, group)
    return made


def analysed(
    made: Made | None = None, command: tuple[str, ...] = ("train.py", "--its", "own"), *,
    phases: tuple[str, ...] = (), until_phase: str | None = None, **told: Any,
) -> Analysis:  # fmt: skip
    """What a dry run on a DGX H100 comes to; ``told`` changes its answer."""
    recording = (made or trained()).recording()
    peak = Pool(allocated=17 * GIB, active=17 * GIB, reserved=20 * GIB, requested=17 * GIB)
    answer = {
        "outcome": "stepped", "steps_taken": 2, "tokens": 16384, "parameters": 10**9, "world_size": 8, "peak": peak,
        "now": peak, "wall_s": 1.5,
    }  # fmt: skip
    request = Request(
        command=command, cluster="dgx-h100", world_size=8, local_ranks=8, steps=2, phases=phases,
        until_phase=until_phase,
    )  # fmt: skip
    run = DryRun(request=request, answer=Answer(**{**answer, **told}), recording=recording)
    return analyse(run, load_cluster("dgx-h100"))


def doubtful(found: Analysis, *doubts: Doubt) -> Analysis:
    """The same with these doubts."""
    return replace(found, prices=replace(found.prices, doubts=doubts))
