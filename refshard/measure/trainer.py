"""One rank's model, optimizer and data, as a strategy makes them: what is measured, emulated and dry-run alike."""

import hashlib
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from refshard.engine.grouping import find_blocks, group_units
from refshard.errors import RefshardError
from refshard.flops import flops_of
from refshard.models.activation import checkpoint_layers, recompute
from refshard.models.data import Batch, Tokens, open_source, rank_batch
from refshard.models.llama import Llama, initialise
from refshard.models.own import Blocks, build_own
from refshard.specs.case import Case
from refshard.specs.model import ModelSpec, is_factory
from refshard.specs.tuning import Frozen
from refshard.strategies.base import Strategy
from refshard.strategies.table import ROWS
from refshard.strategies.world import World

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def compiling_anew() -> Iterator[Callable[[], float]]:
    """Let torch cache what it compiles in a temporary folder, so that nothing from an earlier launch is used.

    The folder lies in torch's own if the environment names one (``TORCHINDUCTOR_CACHE_DIR``), else among the system's
    temporary files. Yields a function that returns the seconds that this process has spent compiling since.
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


def mark_units(units: Iterable[tuple[str, tuple[nn.Module, ...]]]) -> None:
    """From now on, have a trace mark where forward and backward of each unit begin, and where forward ends.

    ``units`` are names, and the modules that are called in their forward. A backward ends where the next begins. What
    activation checkpointing recomputes belongs to the backward around it.
    """

    def hook(name: str, module: nn.Module) -> None:
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

    for name, modules in units:
        for module in modules:
            hook(name, module)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _mark(what: str, name: str) -> None:
    with record_function(f"refshard::{what}({name})"):
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a case trains. ``model`` is bare, with its dropout off; ``drops`` says whether ``begin_dropout`` turns any
    on.

    ``blocks`` name its blocks as :func:`refshard.shard` takes them. ``flops_per_token`` is None if unknown. ``batch``
    takes a step and a data rank: that rank's share of the batch, on its device; the shares in order are the whole.
    """

    model: nn.Module
    blocks: Blocks | None = None
    drops: bool
    flops_per_token: float | None
    batch: Callable[[int, int], Batch]
    begin_dropout: Callable[[], None]


def llama_subject(case: Case, spec: ModelSpec, device: torch.device) -> Subject:
    """A Llama of these dimensions and the case's tokens. Only adapters have dropout."""
    source, model = open_source(case.protocol.data, spec.vocab, case.protocol.seed), build_model(case, spec, device)

    def batch(step: int, data_rank: int) -> Batch:
        inputs, targets = rank_batch(
            source, step=step, rank=data_rank, world_size=case.job.data_ranks, global_batch=case.job.global_batch,
            seq_len=case.job.seq_len,
        )  # fmt: skip
        return Tokens(inputs.to(device), targets.to(device))

    def begin_dropout() -> None:
        from refshard.models.adapters import switch_dropout

        switch_dropout(model, on=True)

    flops = float(flops_of(case.job, spec))
    return Subject(
        model=model, drops=case.job.tuning != "full", flops_per_token=flops, batch=batch, begin_dropout=begin_dropout
    )


def own_subject(case: Case, device: torch.device) -> Subject:
    """The module of the case's factory. Until dropout begins, all of it is in evaluation mode."""
    from refshard.models.counted import count_flops  # torch's counter warns on import without Triton

    own = build_own(case.job.model, case.protocol.seed, torch.device("meta") if is_deferred(case) else device)
    training = [module for module in own.module.modules() if module.training]
    own.module.eval()
    try:
        flops = count_flops(own, case.job.seq_len, backward=case.job.workload == "training") or None
    except Exception as error:  # a module need not run on the meta device
        flops, why = None, f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(
            f"refshard: no TFLOPS and no MFU, since FLOPs are counted on the meta device, where '{own.factory}' raises "
            f"{why}",
            stacklevel=1,
        )
    blocks = list(find_blocks(own.module, own.blocks).values())
    recompute(blocks, case.job.checkpointed(len(blocks)), random=True)

    def batch(step: int, data_rank: int) -> Batch:
        share = case.job.global_batch // case.job.data_ranks
        seed = int.from_bytes(hashlib.sha256(f"{case.protocol.seed}/{step}".encode()).digest()[:8], "little") >> 1
        rows = range(data_rank * share, (data_rank + 1) * share)
        return own.batch(seed, case.job.global_batch, case.job.seq_len, rows, device)

    def begin_dropout() -> None:
        for module in training:
            module.training = True

    return Subject(
        model=own.module, blocks=own.blocks, drops=bool(training), flops_per_token=flops, batch=batch,
        begin_dropout=begin_dropout,
    )  # fmt: skip


def build_model(case: Case, spec: ModelSpec, device: torch.device) -> Llama:
    """The bare model that a strategy gets: initialised on ``device``, with the case's adapters and checkpointing. If
    :func:`is_deferred`, it is on the meta device; the strategy shards it and then fills it.

    With adapters, weights have the dtype of the computation; else masters are fp32 in any precision.
    """
    job = case.job
    with torch.device("meta"):
        model = Llama(spec)
    if not is_deferred(case):
        model.to_empty(device=device)
        initialise(model, case.protocol.seed)
    if (lora := job.lora) is not None:
        # Imported here because these packages come with an extra, and take seconds to import.
        from refshard.models.adapters import adapt, switch_dropout

        if job.precision == "bf16":
            model.to(torch.bfloat16)
        if job.tuning == "qlora":
            from refshard.models.nf4 import quantise

            quantise(model)
        adapt(model, lora, case.protocol.seed)
        switch_dropout(model, on=False)
    freeze(model, job.frozen_parts)
    checkpoint_layers(model, job.checkpointed(len(model.model.layers)))
    return model


def freeze(model: Llama, frozen: Frozen) -> None:
    """Leave parts of ``model`` untrained. A tied head is frozen with the embedding, and the embedding with it."""
    parts = [model.model.embed_tokens] * frozen.embedding + [model.lm_head] * frozen.head
    for part in (*parts, *model.model.layers[: frozen.layers]):
        part.requires_grad_(False)


def is_deferred(case: Case) -> bool:
    """Whether the strategy of a case gets its model on the meta device, so that no rank ever holds all of it.

    A factory's module is deferred only in a dry run, which computes no values: only the factory can initialise it.
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
        self._subject = own_subject(case, device) if spec is None else llama_subject(case, spec, device)
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
        """How many of the trained elements this rank holds, without padding."""
        parameters = (p for p in self._subject.model.parameters() if p.requires_grad and not p.is_meta)
        return sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)

    @property
    def drops(self) -> bool:
        """Whether training drops anything, once :meth:`begin_dropout` is called."""
        return self._subject.drops and self._case.job.workload == "training"

    def begin_dropout(self) -> None:
        """Turn dropout on. It was off for the proof, since what is dropped, and so the loss, depends on the rank."""
        self._subject.begin_dropout()

    def mark_units(self) -> None:
        """From now on, have traces say which unit computes."""
        mark_units(self._units)

    def batch(self, step: int) -> Batch:
        """This rank's share of a step's batch, on its device."""
        return self._subject.batch(step, self._world.data_rank)

    def step(self, batch: Batch) -> torch.Tensor:
        """Compute one step and return its loss, scalar fp32, without waiting for it."""
        return self._loop.train(batch) if self._case.job.workload == "training" else self._loop.infer(batch)

    def timed_step(self, *, aligned: bool) -> float:
        """Compute one step and return its synchronised wall time in seconds.

        If ``aligned``, ranks first wait for each other, which is not timed.
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
        """Compute ``steps`` free-running steps, as in training that rarely reads its loss; return the mean wall time,
        s.

        Ranks start together, batches are ready, and the host waits for the device only after all steps are issued.
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
