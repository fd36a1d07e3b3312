"""How each strategy trains, as data: a mode's op stream, which parameters form its units, and what it does beside it.

The engine's modes are rows here, and so are torch's own ways. What a row says of FSDP1, FSDP2 and DDP was read in
torch 2.13 (``distributed/fsdp/_flat_param.py``, ``_runtime_utils.py``, ``_fully_shard/_fsdp_collectives.py`` and
``_fsdp_param_group.py``, ``nn/parallel/distributed.py``).
"""

from typing import Literal

import msgspec

from refshard.engine.placement import MODES, Mode
from refshard.quantities import MIB

Grouping = Literal["ends", "root", "buckets"]
"""What lies beside the blocks: units of its own for what comes before and after them; one unit around them all; or no
units at all, but buckets of gradients.
"""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, under the name that suites give it.

    ``copies_out``: a gather lands in a buffer of its own, from which compute copies into the parameters; the buffer is
    kept until the next gather has been copied out. ``copies_in``: compute copies gradients into the buffer that is
    reduced. ``divides``: kernels beside compute divide and cast that buffer before it is reduced. ``flat``: units
    are flattened whole; else each parameter is padded to the ranks by its first dimension. ``bucket_bytes`` is the size
    of gradient buckets, the first of ``first_bucket_bytes``. Over gloo, ``awaits_gathers`` says that a gather is
    awaited where it is issued, and ``exchanges_gathers`` and ``exchanges_reductions`` that parts are exchanged, and
    summed here, instead of what gloo would do.
    """

    name: str
    mode: Mode
    grouping: Grouping
    flat: bool = True
    copies_out: bool = False
    copies_in: bool = True
    divides: bool = False
    bucket_bytes: int = 0
    first_bucket_bytes: int = 0
    awaits_gathers: bool = False
    exchanges_gathers: bool = False
    exchanges_reductions: bool = False


MASTER_BYTES = 4
"""Masters, and the gradients and the state of the optimizer, are fp32 in every recipe."""
NEVER_AWAITED = 1 << 20
"""Gradient slots of which no model has as many units."""


def _sharded(name: str, **changes: object) -> Mode:
    """FSDP's own way with storage: transient, one unit ahead, one reduction under way."""
    return msgspec.structs.replace(MODES["fsdp"], name=name, **changes)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="ddp", mode=MODES["replicate"], grouping="buckets", copies_in=False,
            bucket_bytes=25 * MIB, first_bucket_bytes=1 * MIB,
        ),
        # Units as YaFSDP's migration guide wraps them.
        Recipe(
            name="fsdp1", mode=_sharded("fsdp1", gradient_slots=NEVER_AWAITED), grouping="ends", divides=True,
        ),
        Recipe(
            name="fsdp2", mode=_sharded("fsdp2"), grouping="root", flat=False, copies_out=True, awaits_gathers=True,
        ),
        Recipe(
            name="fsdp2-tuned", mode=_sharded("fsdp2-tuned"), grouping="ends", flat=False, copies_out=True,
            exchanges_reductions=True,
        ),
        *(
            Recipe(
                name=f"refshard-{mode.name}", mode=mode, grouping="ends",
                exchanges_gathers=True, exchanges_reductions=True,
            )
            for mode in MODES.values()
        ),
    )
}  # fmt: skip
"""Rows by name; the engine's modes are ``refshard-<mode>``."""
