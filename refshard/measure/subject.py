"""The bare model that a case trains, and its batches: a Llama and tokens, or a module of the user's own."""

import hashlib
import warnings
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import nn

from refshard.engine.grouping import find_blocks
from refshard.flops import Convention, flops_per_token
from refshard.models.activation import checkpoint_layers, recompute
from refshard.models.data import Batch, Tokens, open_source, rank_batch
from refshard.models.llama import Llama, initialise
from refshard.models.own import Blocks, build_own
from refshard.specs.case import CaseSpec
from refshard.specs.model import ModelSpec, is_factory
from refshard.strategies.table import ROWS

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

    def __init__(self, case: CaseSpec, spec: ModelSpec, device: torch.device) -> None:
        self._case, self._device = case, device
        self._source = open_source(case.data, spec.vocab, case.seed)
        self.model: Llama = build_model(case, spec, device)
        self.drops = case.tuning != "full"
        self.flops_per_token = float(flops_per_token(spec, case.seq_len, CONVENTION, case.workload, case.tuning))

    def batch(self, step: int, data_rank: int) -> Batch:
        """See :meth:`Subject.batch`."""
        case = self._case
        inputs, targets = rank_batch(
            self._source, step=step, rank=data_rank, world_size=case.data_ranks, global_batch=case.global_batch,
            seq_len=case.seq_len,
        )  # fmt: skip
        return Tokens(inputs.to(self._device), targets.to(self._device))

    def begin_dropout(self) -> None:
        """See :meth:`Subject.begin_dropout`."""
        from refshard.models.adapters import switch_dropout

        switch_dropout(self.model, on=True)


@final
class OwnSubject(Subject):
    """What the case's factory makes. Until dropout begins, the whole module is in evaluation mode."""

    def __init__(self, case: CaseSpec, device: torch.device) -> None:
        self._case, self._device = case, device
        where = torch.device("meta") if is_deferred(case) else device
        self._own = build_own(case.model, case.seed, where)
        self.model, self.blocks = self._own.module, self._own.blocks
        self._training = [module for module in self.model.modules() if module.training]
        self.drops = bool(self._training)
        self.model.eval()
        self.flops_per_token = self._count()
        recompute(list(find_blocks(self.model, self.blocks).values()), case.checkpointing, random=True)

    def _count(self) -> float | None:
        from refshard.models.counted import count_flops  # torch's counter warns on import where there is no Triton

        try:
            found = count_flops(self._own, self._case.seq_len, backward=self._case.workload == "training")
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
        case, share = self._case, self._case.global_batch // self._case.data_ranks
        seed = int.from_bytes(hashlib.sha256(f"{case.seed}/{step}".encode()).digest()[:8], "little") >> 1
        rows = range(data_rank * share, (data_rank + 1) * share)
        return self._own.batch(seed, case.global_batch, case.seq_len, rows, self._device)

    def begin_dropout(self) -> None:
        """See :meth:`Subject.begin_dropout`: back to the modes that the factory left."""
        for module in self._training:
            module.training = True


def build_model(case: CaseSpec, spec: ModelSpec, device: torch.device) -> Llama:
    """The bare model that a strategy is given: initialised on ``device``, adapted if the case says so, its layers
    checkpointed. Where :func:`is_deferred`, it is on the meta device, for the strategy to shard and then to fill.

    What is tuned by adapters is in the dtype that is computed with; else masters are fp32, whatever the precision.
    """
    with torch.device("meta"):
        model = Llama(spec)
    if not is_deferred(case):
        model.to_empty(device=device)
        initialise(model, case.seed)
    if case.tuning != "full":
        # Here, since these packages come with an extra, and take seconds to import.
        from refshard.models.adapters import adapt, switch_dropout

        if case.precision == "bf16":
            model.to(torch.bfloat16)
        if case.tuning == "qlora":
            from refshard.models.nf4 import quantise

            quantise(model)
        adapt(model, case.seed)
        switch_dropout(model, on=False)
    checkpoint_layers(model, case.checkpointing)
    return model


def is_deferred(case: CaseSpec) -> bool:
    """Whether the strategy of a case is given its model on the meta device, so that no rank ever holds all of it.

    An own module is there only in a dry run, which computes no values: nothing else knows how to initialise it.
    """
    if is_factory(case.model) and case.fidelity != "dryrun":
        return False
    return case.tuning == "full" and ROWS[case.strategy].deferred
