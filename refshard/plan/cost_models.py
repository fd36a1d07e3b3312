"""How each data-parallel strategy keeps and communicates a model's state, as rows of numbers.

The engine's rows follow from its modes; the other rows say what each strategy's code does.
"""

from dataclasses import dataclass

from refshard.costs import ADAMW_BYTES
from refshard.engine.placement import MODES, Mode
from refshard.errors import SpecError, nearest

MASTER_BYTES = 4
"""Masters, and the gradients and the state of the optimizer, are fp32 in every strategy."""
STATE_BYTES = {
    "adamw": 2.0 * MASTER_BYTES,
    "adamw-8bit": 2 * (1 + 4 / 256),
    "muon": 1.0 * MASTER_BYTES,
    "adafactor": 1.0 * MASTER_BYTES,
    "sgd": 1.0 * MASTER_BYTES,
}
"""State of the optimizer for each element: AdamW's two averages in fp32, or in 8 bits with an fp32 scale for 256 of
them (torchao); Muon's momentum, which only the matrices of blocks have: AdamW updates the others. SGD's momentum.
Adafactor's average of a vector's elements; of a matrix, it has one of each row and each column.
"""
UPDATED_BYTES = {"adamw": ADAMW_BYTES, "adamw-8bit": 16, "muon": 20, "adafactor": 68, "sgd": 32}
"""Bytes that the optimizer reads and writes for each element: parameter, gradient and state. torch's SGD has three
kernels (foreach), its Adafactor eleven, most of them over the update.
"""
NEWTON_SCHULZ = 5
"""Muon's iterations of each matrix, (m, n) with m <= n, of 4 m^2 n + 2 m^3 FLOPs (Jordan et al., "Muon", 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One strategy. Bytes are per element.

    - ``shards_parameters``, ``shards_gradients``, ``shards_optimizer``: whether each is sharded over the shard axis.
    - ``kept_bytes``: parameters in the compute dtype that every rank keeps in addition to the masters.
    - ``summed_bytes``: gradients that every rank keeps unsharded.
    - ``parameter_slots``: number of units that are gathered at once, if parameters are gathered for each use.
    - ``holds_last``: whether the last block is still gathered at the loss.
    - ``around``: whether both ends of the model are one unit around the blocks; otherwise each end is a unit.
    - ``keeps``: whether gathered parameters stay until the end of a pass.
    - ``copies_out``, ``copies_in``: whether separate kernels copy from a gathered buffer, and to a reduced one.
    - ``divides``: whether a kernel casts and scales the buffer before the reduction.
    - ``casts``: whether autocast casts each weight once a step.
    - ``adds``: whether separate kernels accumulate unsharded gradients; false if the matrix products do.
    - ``casts_frozen``: whether frozen parameters have no masters, and only those in the compute dtype are kept.
    - ``exchanges_gathers``, ``exchanges_reductions``: whether, over gloo, ranks exchange parts and add them up instead
      of calling gloo's collective.
    """

    name: str
    shards_parameters: bool
    shards_gradients: bool
    shards_optimizer: bool
    kept_bytes: int = 0
    summed_bytes: int = 0
    parameter_slots: int = 2
    holds_last: bool = False
    around: bool = False
    keeps: bool = False
    copies_out: bool = False
    copies_in: bool = True
    divides: bool = False
    casts: bool = False
    adds: bool = True
    casts_frozen: bool = False
    exchanges_gathers: bool = False
    exchanges_reductions: bool = False

    @property
    def by_unit(self) -> bool:
        """Whether parameters are gathered and gradients reduced unit by unit, in every microbatch."""
        return self.shards_parameters


def _of_mode(mode: Mode) -> CostModel:
    """The row of one of the engine's modes."""
    replicated, summed = mode.parameters == "replicate", mode.gradients == "replicate"
    return CostModel(
        name=f"refshard-{mode.name}", shards_parameters=not replicated, shards_gradients=not summed,
        shards_optimizer=mode.optimizer == "shard", kept_bytes=2 if replicated else 0, summed_bytes=4 if summed else 0,
        keeps=not replicated and mode.storage == "persistent", holds_last=mode.storage != "persistent",
        casts_frozen=True, exchanges_gathers=True, exchanges_reductions=True,
    )  # fmt: skip


COST_MODELS: dict[str, CostModel] = {
    one.name: one
    for one in (
        # The rows of FSDP1, FSDP2 and DDP follow torch 2.13 (distributed/fsdp/_flat_param.py,
        # _runtime_utils.py, _fully_shard/_fsdp_collectives.py and _fsdp_param_group.py, nn/parallel/distributed.py).
        # DDP has buckets in addition to the gradients.
        CostModel(
            name="single", shards_parameters=False, shards_gradients=False, shards_optimizer=False,
            summed_bytes=MASTER_BYTES, copies_in=False, casts=True,
        ),
        CostModel(
            name="ddp", shards_parameters=False, shards_gradients=False, shards_optimizer=False, summed_bytes=8,
            copies_in=False, casts=True,
        ),
        # Units as YaFSDP's migration guide wraps them.
        CostModel(name="fsdp1", shards_parameters=True, shards_gradients=True, shards_optimizer=True, divides=True),
        CostModel(
            name="fsdp2", shards_parameters=True, shards_gradients=True, shards_optimizer=True, around=True,
            copies_out=True,
        ),
        CostModel(
            name="fsdp2-tuned", shards_parameters=True, shards_gradients=True, shards_optimizer=True, copies_out=True,
            exchanges_reductions=True,
        ),
        *map(_of_mode, MODES.values()),
        # Megatron-LM's distributed optimizer: bf16 parameters and fp32 gradients whole, all else divided.
        CostModel(
            name="megatron", shards_parameters=False, shards_gradients=False, shards_optimizer=True, kept_bytes=2,
            summed_bytes=4, copies_in=False, adds=False,
        ),
        CostModel(
            name="fsdp1-grad-op", shards_parameters=True, shards_gradients=True, shards_optimizer=True,
            divides=True, keeps=True,
        ),
        CostModel(name="simplefsdp", shards_parameters=True, shards_gradients=True, shards_optimizer=True),
        # SimpleFSDP with collectives merged by block and issued a block early (torch 2.13,
        # _inductor/fx_passes/bucketing.py and overlap_manual_scheduling.py): a block's parameters are copies, and
        # only the next block lies in the buffer that it was gathered into.
        CostModel(
            name="simplefsdp-by-block", shards_parameters=True, shards_gradients=True, shards_optimizer=True,
            parameter_slots=1, copies_out=True,
        ),
    )
}  # fmt: skip
"""Rows by name."""


def find_cost_model(name: str) -> CostModel:
    """The row of a strategy.

    Raises:
        SpecError: it has none.
    """
    if name not in COST_MODELS:
        raise SpecError(f"strategy: no strategy '{name}' has a closed form; {nearest(name, list(COST_MODELS))}")
    return COST_MODELS[name]
