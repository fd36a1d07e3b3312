"""One rank's model, optimizer and data, as a strategy makes them: what is measured, emulated and dry-run alike."""

import hashlib
import math
import os
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from refshard.engine.grouping import find_blocks, group_units
from refshard.errors import RefshardError
from refshard.flops import Convention, flops_per_token
from refshard.models.activation import checkpoint_layers, recompute
from refshard.models.data import Batch, Tokens, open_source, rank_batch
from refshard.models.llama import Llama, initialise
from refshard.models.own import Blocks, build_own
from refshard.specs.case import Case
from refshard.specs.model import ModelSpec, is_factory
from refshard.strategies.base import Strategy
from refshard.strategies.table import ROWS
from refshard.strategies.world import World

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def compiling_anew() -> Iterator[Callable[[], float]]:
    """Have torch keep what it compiles in a folder that goes at the end: nothing is taken from an earlier launch.

    The folder lies in torch's own if the environment names one (``TORCHINDUCTOR_CACHE_DIR``), else among the system's
    temporary files. Yields a function that tells the seconds that this process has spent compiling since; 0.0 if it has
    compiled nothing.
    """
    given, before = os.environ.get(_FOLDER), _spent_s()
    if given is not None:
        Path(given).mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="refshard-compiled-", dir=given) as folder:
            os.environ[_FOLDER] = folder
            yield lambda: _spent_s() - before
    finally:
        if given is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = given


def _spent_s() -> float:
    """Seconds that this process has spent in torch's compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent().get("total_wall_time", 0.0))


Units = tuple[tuple[str, tuple[nn.Module, ...]], ...]
"""Names of units, and the modules whose calls are their forward."""


def mark_units(units: Iterable[tuple[str, tuple[nn.Module, ...]]]) -> None:
    """From now on, have a trace say where forward and backward of each unit begin, and where forward ends.

    A backward ends where the next begins. What activation checkpointing recomputes belongs to the backward around it.
    """
    for name, modules in units:
        for module in modules:
            _hook(name, module)


def _hook(name: str, module: nn.Module) -> None:
    def before(*_: Any) -> None:
        if not _in_backward():
            _mark("forward", name)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if _in_backward():
            return
        _mark("leave", name)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: _mark("backward", name))

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _mark(what: str, name: str) -> None:
    with record_function(f"refshard::{what}({name})"):
        pass


CONVENTION: Convention = "A"
"""By which a Llama's FLOPs are counted."""


class Subject(ABC):
    """``model`` is bare, with its dropout off; ``blocks`` name its blocks as :func:`refshard.shard` takes them.

    ``drops`` says whether it has dropout to turn on, ``flops_per_token`` how many model FLOPs a token takes.
    """

    model: nn.Module
    blocks: Blocks | None = None
    drops: bool
    flops_per_token: float | None

    @abstractmethod
    def batch(self, step: int, data_rank: int) -> Batch:
        """A rank's share of a step's batch, on its device; the ranks' shares in order are the global batch."""

    @abstractmethod
    def begin_dropout(self) -> None:
        """Turn dropout on, as the model's own recipe has it."""


@final
class LlamaSubject(Subject):
    """A Llama of these dimensions and the case's tokens. Only adapters have dropout."""

    def __init__(self, case: Case, spec: ModelSpec, device: torch.device) -> None:
        job = case.job
        self._case, self._device = case, device
        self._source = open_source(case.protocol.data, spec.vocab, case.protocol.seed)
        self.model: Llama = build_model(case, spec, device)
        self.drops = job.tuning != "full"
        self.flops_per_token = float(flops_per_token(spec, job.seq_len, CONVENTION, job.workload, job.tuning))

    def batch(self, step: int, data_rank: int) -> Batch:
        """See :meth:`Subject.batch`."""
        case = self._case
        inputs, targets = rank_batch(
            self._source, step=step, rank=data_rank, world_size=case.job.data_ranks, global_batch=case.job.global_batch,
            seq_len=case.job.seq_len,
        )  # fmt: skip
        return Tokens(inputs.to(self._device), targets.to(self._device))

    def begin_dropout(self) -> None:
        """See :meth:`Subject.begin_dropout`."""
        from refshard.models.adapters import switch_dropout

        switch_dropout(self.model, on=True)


@final
class OwnSubject(Subject):
    """What the case's factory makes. Until dropout begins, the whole module is in evaluation mode."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case, self._device = case, device
        where = torch.device("meta") if is_deferred(case) else device
        self._own = build_own(case.job.model, case.protocol.seed, where)
        self.model, self.blocks = self._own.module, self._own.blocks
        self._training = [module for module in self.model.modules() if module.training]
        self.drops = bool(self._training)
        self.model.eval()
        self.flops_per_token = self._count()
        blocks = list(find_blocks(self.model, self.blocks).values())
        recompute(blocks, case.job.checkpointed(len(blocks)), random=True)

    def _count(self) -> float | None:
        from refshard.models.counted import count_flops  # torch's counter warns on import where there is no Triton

        try:
            found = count_flops(self._own, self._case.job.seq_len, backward=self._case.job.workload == "training")
        except Exception as error:  # a module need not run on the meta device
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            warnings.warn(
                f"refshard: no TFLOPS and no MFU, since FLOPs are counted on the meta device, where "
                f"'{self._own.factory}' raises {why}",
                stacklevel=1,
            )
            return None
        return found or None

    def batch(self, step: int, data_rank: int) -> Batch:
        """See :meth:`Subject.batch`."""
        case, share = self._case, self._case.job.global_batch // self._case.job.data_ranks
        seed = int.from_bytes(hashlib.sha256(f"{case.protocol.seed}/{step}".encode()).digest()[:8], "little") >> 1
        rows = range(data_rank * share, (data_rank + 1) * share)
        return self._own.batch(seed, case.job.global_batch, case.job.seq_len, rows, self._device)

    def begin_dropout(self) -> None:
        """See :meth:`Subject.begin_dropout`: back to the modes that the factory left."""
        for module in self._training:
            module.training = True


def build_model(case: Case, spec: ModelSpec, device: torch.device) -> Llama:
    """The bare model that a strategy is given: initialised on ``device``, adapted if the case says so, its layers
    checkpointed. Where :func:`is_deferred`, it is on the meta device, for the strategy to shard and then to fill.

    What is tuned by adapters is in the dtype that is computed with; else masters are fp32, whatever the precision.
    """
    job = case.job
    with torch.device("meta"):
        model = Llama(spec)
    if not is_deferred(case):
        model.to_empty(device=device)
        initialise(model, case.protocol.seed)
    if job.tuning != "full":
        # Here, since these packages come with an extra, and take seconds to import.
        from refshard.models.adapters import adapt, switch_dropout

        if job.precision == "bf16":
            model.to(torch.bfloat16)
        if job.tuning == "qlora":
            from refshard.models.nf4 import quantise

            quantise(model)
        adapt(model, case.protocol.seed)
        switch_dropout(model, on=False)
    checkpoint_layers(model, job.checkpointed(len(model.model.layers)))
    return model


def is_deferred(case: Case) -> bool:
    """Whether the strategy of a case is given its model on the meta device, so that no rank ever holds all of it.

    An own module is there only in a dry run, which computes no values: nothing else knows how to initialise it.
    """
    job = case.job
    if is_factory(job.model) and case.protocol.fidelity != "dryrun":
        return False
    return job.tuning == "full" and ROWS[job.strategy].deferred


class Trainer:
    """One rank's model, optimizer and data; ``timed_step`` computes on the next batch.

    ``spec`` is None if the case names a factory. ``trained`` is the number of elements that all ranks together train,
    ``blocks`` are the names of the model's blocks, ``flops_per_token`` its model FLOPs, None if they are not known.
    """

    def __init__(
        self, case: Case, spec: ModelSpec | None, strategy: Strategy, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._case, self._device = case, device
        self.losses: list[float] = []
        self._subject: Subject = OwnSubject(case, device) if spec is None else LlamaSubject(case, spec, device)
        model, named = self._subject.model, self._subject.blocks
        self.flops_per_token = self._subject.flops_per_token
        self.trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.blocks = tuple(find_blocks(model, named))
        self._units = tuple((group.name, group.modules) for group in group_units(model, named))
        self._world = World.of(case, group, device, self.blocks)
        self._loop = strategy.wrap(cast(Any, model), self._world)  # rows without the axis "own model" get a Llama
        torch.manual_seed((case.protocol.seed << 16) + self._world.data_rank)  # ranks that share tokens drop the same

    @property
    def held(self) -> int:
        """How many of the trained elements this rank holds; padding is none of them."""
        parameters = (p for p in self._subject.model.parameters() if p.requires_grad and not p.is_meta)
        return sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)

    @property
    def drops(self) -> bool:
        """Whether training drops anything, once :meth:`begin_dropout` is called."""
        return self._subject.drops and self._case.job.workload == "training"

    def begin_dropout(self) -> None:
        """Turn dropout on. Until now it was off: which elements are dropped depends on the rank, so that the losses of
        the proof could equal nobody's.
        """
        self._subject.begin_dropout()

    def mark_units(self) -> None:
        """From now on, have traces say which unit computes."""
        mark_units(self._units)

    def batch(self, step: int) -> Batch:
        """This rank's share of a step's batch, on its device."""
        return self._subject.batch(step, self._world.data_rank)

    def step(self, batch: Batch) -> torch.Tensor:
        """Compute one step and return its loss, scalar fp32, for which nothing has waited."""
        return self._loop.train(batch) if self._case.job.workload == "training" else self._loop.infer(batch)

    def timed_step(self, *, aligned: bool) -> float:
        """Compute one step and return its synchronised wall time in seconds.

        ``aligned`` lets all ranks start together, outside of the time taken.
        """
        batch = self.batch(len(self.losses))
        if aligned:
            dist.barrier(self._world.group)
        self._synchronise()
        started = time.perf_counter()
        loss = self.step(batch)
        self._synchronise()
        elapsed = time.perf_counter() - started
        self.losses.append(loss.item())
        if not math.isfinite(self.losses[-1]):
            raise RefshardError(f"the loss of step {len(self.losses) - 1} is {self.losses[-1]}; lower learning_rate")
        return elapsed

    def free_step_s(self, steps: int) -> float:
        """Compute ``steps`` steps as training does that rarely reads its loss, and return the mean wall time, s.

        Ranks start together, batches are there before, and nothing waits for the device until all steps are issued.
        """
        batches = [self.batch(len(self.losses) + step) for step in range(steps)]
        dist.barrier(self._world.group)
        self._synchronise()
        started = time.perf_counter()
        losses = [self.step(batch) for batch in batches]
        self._synchronise()
        elapsed = time.perf_counter() - started
        self.losses += [loss.item() for loss in losses]
        return elapsed / steps

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
