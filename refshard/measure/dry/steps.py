"""A few steps of a case on the fake device, and what its last one comes to."""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec
import torch
import torch.distributed as dist
import torch.fx.experimental._config as symbolic

from refshard.dryrun.collect import collect, load, save
from refshard.dryrun.held_back import holds_back
from refshard.dryrun.observe import Observer
from refshard.dryrun.peaks import pool
from refshard.errors import UnsupportedError
from refshard.measure.dry.rank import RECORDING_FILE, DryCase, DryResult, rank_folder, ranks_of
from refshard.measure.dry.ranks import BUILT, GPU, asked_for, read_ranks, remarks, steps_for
from refshard.measure.rank import PROGRESS_FILE, describe
from refshard.measure.trainer import Trainer
from refshard.records import State
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import ClusterSpec
from refshard.specs.model import known_dimensions
from refshard.strategies import make_strategy, strategy_for
from refshard.strategies.base import Strategy
from refshard.strategies.table import ROWS

_AT_FIRST = (
    "torch._dynamo",
    "torch._meta_registrations",
    "torch._refs",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
)


def run_steps(asked: DryCase, cluster: ClusterSpec, ext: ModuleType, folder: Path) -> DryResult:
    """Take the steps of one rank, which works in ``folder``; the last rank reads what the device's extension ``ext``
    recorded of all.

    What the case meets on the way is its result.
    """
    device = torch.device("cuda", GPU)
    torch.cuda.set_device(device)
    symbolic.meta_nonzero_assume_all_nonzero = True
    dist.init_process_group("nccl")
    try:
        strategy = strategy_for(asked.case, cuda=True)
        stepped, trainer = _train(asked, strategy, device, ext, folder)
        result = DryResult(
            state="ok",
            stepped=stepped,
            trained=trainer.trained,
            held=trainer.held,
            blocks=trainer.blocks,
            flops_per_token=trainer.flops_per_token,
            peak=pool(device.index, "peak"),
            wrapped_units=strategy.wrapped_units(),
            announced=strategy.announced(),
        )
    except BaseException as error:
        return _ended_by(error, device.index)
    recording = collect(ext, asked.rank, asked.case.world_size)
    # The allocator's retries are known here only if all of its memory came free when the host knew.
    retries = 0 if holds_back(recording) else torch.cuda.memory_stats()["num_alloc_retries"]
    result = msgspec.structs.replace(result, warnings=tuple(remarks(recording, retries)))
    if asked.rank != ranks_of(asked.case)[-1]:
        save(recording, folder / RECORDING_FILE)
        return result
    _tell(asked, folder, "replay")
    recordings = [load(rank_folder(folder.parent, rank) / RECORDING_FILE) for rank in ranks_of(asked.case)[:-1]]
    return read_ranks(asked, result, [*recordings, recording], cluster, ext, folder.parent)


def preload(case: CaseSpec) -> None:
    """Import what a rank's first step imports, so that ranks which are forked from this process need not."""
    for module in _AT_FIRST:
        import_module(module)
    if case.strategy in ROWS:
        make_strategy(case.strategy)
    _ = torch.empty(1, device="meta") + 1  # torch registers its meta kernels


def _train(
    asked: DryCase, strategy: Strategy, device: torch.device, ext: ModuleType, folder: Path
) -> tuple[int, Trainer]:
    """How many elements this rank's optimizer steps, and what trained."""
    case = asked.case
    ext.record(True)
    observer = Observer(ext, sys.maxsize)  # which would end a script after that many steps
    observer.install()
    _tell(asked, folder, "build")
    group = dist.group.WORLD
    assert group is not None
    trainer = Trainer(case, known_dimensions(case.model), strategy, group, device)
    if trainer.drops:
        trainer.begin_dropout()
    batch = trainer.batch(0)
    torch.cuda.empty_cache()  # what building took is not the steps'
    torch.cuda.reset_peak_memory_stats(device)
    ext.mark(BUILT)
    for step in range(steps := steps_for(case)):
        _tell(asked, folder, f"step {step + 1}/{steps}")
        trainer.step(batch)
        if case.workload == "inference":  # else the optimizer's step is marked
            ext.mark("step")
    ext.record(False)
    return observer.stepped, trainer


def _tell(asked: DryCase, folder: Path, what: str) -> None:
    rank = f"rank {asked.rank}, " if len(ranks_of(asked.case)) > 1 else ""
    (folder.parent / PROGRESS_FILE).write_text(rank + what)


def _ended_by(error: BaseException, device: int) -> DryResult:
    traceback.print_exception(error)
    if isinstance(error, torch.OutOfMemoryError):
        return DryResult(
            state="oom", error=describe(error), peak=pool(device, "peak"), refused=asked_for(str(error))
        )  # fmt: skip
    state: State = "unsupported" if isinstance(error, UnsupportedError) else "failed"
    return DryResult(state=state, error=describe(error))
