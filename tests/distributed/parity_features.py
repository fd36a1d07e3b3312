"""The features of the parity matrix, as rows of data, and its cells."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

from refshard.engine.placement import MODES, Accumulation
from tests.distributed.parity_models import Net

STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One way of training, that every mode at every world size must get right.

    ``make`` builds the model, ``order`` gives the blocks that run in a step. ``precision`` is the dtypes of parameters
    in compute and of gradients in reduction. ``clip`` says whose clipping is called, by 1-, 2- and maximum norm in
    turn. ``mesh`` has two axes, replicate and shard. With ``scaled``, losses are scaled, and infinities planted.

    ``peers`` are those that have the feature. Distances are relative: of losses, and of gradients in terms of the norm
    of each; ``loss`` and ``gradient`` from one rank in fp32, ``peer_loss`` and ``peer_gradient`` from a peer. Unless
    ``exact`` is false, one rank equals the bare model to the bit, and unless ``peers_exact`` is, two ranks their peers:
    two terms have but one sum.
    """

    make: Callable[[], Net] = Net
    order: Callable[[int], tuple[int, ...]] | None = None
    precision: tuple[torch.dtype, torch.dtype] | None = None
    accumulation: Accumulation | None = None
    microbatches: int = 1
    clip: Literal["refshard", "torch"] | None = None
    mesh: tuple[int, int] | None = None
    groups: bool = False
    meta: bool = False
    compiled: bool = False
    offload: bool = False
    scaled: bool = False
    evaluates: bool = False
    peers: tuple[str, ...] = ("ddp", "fsdp2")
    loss: float = 1e-6
    gradient: float = 1e-5
    peer_loss: float = 1e-6
    peer_gradient: float = 1e-5
    exact: bool = True
    peers_exact: bool = True

    def peers_at(self, world_size: int) -> tuple[str, ...]:
        """The peers that have the feature on that many ranks: of 9 rows in 4 parts the last is empty, and FSDP2's
        maximum norm raises on that rank alone.
        """
        return self.peers if self.clip is None or world_size < 4 else tuple(p for p in self.peers if p != "fsdp2")

    def suits(self, mode: str, world_size: int) -> bool:
        """Whether there is such a cell."""
        if self.mesh is not None and self.mesh[0] * self.mesh[1] != world_size:
            return False
        # A ring of gradient slots cannot keep them for a later microbatch.
        return not (self.accumulation == "unsharded" and MODES[mode].gradient_storage == "ring")


def _adapters(name: str) -> bool:
    return name.endswith((".a", ".b"))


def _adapters_and_embedding(name: str) -> bool:
    return _adapters(name) or name.startswith("embed")


def _some_frozen(name: str) -> bool:
    """All but a whole block, a bias of another one, and the head."""
    return not name.startswith(("layers.1.", "layers.2.up.bias", "head"))


def _now_and_then(step: int) -> tuple[int, ...]:
    return (0, 1, 2, 3) if step % 5 else (0, 1, 3)


def _narrow(parameters: torch.dtype, reduction: torch.dtype, **more: bool) -> Feature:
    """16 bits in compute. Where a sum differs in its last bit, some parameter later rounds to its other neighbour."""
    peer_loss, peer_gradient = (2e-3, 0.1) if reduction is torch.bfloat16 else (1e-4, 1e-2)
    return Feature(
        precision=(parameters, reduction),
        peers=("fsdp2",),
        loss=2e-3,
        gradient=0.1,
        peer_loss=peer_loss,
        peer_gradient=peer_gradient,
        exact=False,
        **more,  # type: ignore[arg-type]
    )


FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "tied": Feature(make=partial(Net, tied=True)),
    "accumulation in the shard": Feature(accumulation="shard", microbatches=3, peers=("fsdp2",)),
    "accumulation unsharded": Feature(accumulation="unsharded", microbatches=3),
    "bf16 reduced in fp32": _narrow(torch.bfloat16, torch.float32),
    "bf16 reduced in bf16": _narrow(torch.bfloat16, torch.bfloat16),
    "fp16 scaled": _narrow(torch.float16, torch.float32, scaled=True),
    # Norms are sums in another order than one rank's or a peer's.
    "clip": Feature(clip="refshard", exact=False, peers_exact=False),
    "torch clip": Feature(clip="torch", peers_exact=False),
    "checkpoint all": Feature(make=partial(Net, checkpoint_every=1)),
    "checkpoint every second": Feature(make=partial(Net, checkpoint_every=2)),
    "meta device": Feature(meta=True, peers=("ddp",)),
    "frozen": Feature(make=partial(Net, trained=_some_frozen)),
    "lora": Feature(make=partial(Net, adapted=True, trained=_adapters)),
    "lora and embedding": Feature(make=partial(Net, adapted=True, trained=_adapters_and_embedding)),
    "runs twice": Feature(order=lambda _: (0, 1, 1, 2, 3)),
    "never runs": Feature(make=partial(Net, spare=True), order=lambda _: (0, 1, 3)),
    "runs now and then": Feature(order=_now_and_then),
    "groups": Feature(groups=True),
    "compiled": Feature(compiled=True),
    "offload": Feature(offload=True),
    "evaluation": Feature(evaluates=True),
    "hybrid 2x2": Feature(mesh=(2, 2), peers=("fsdp2",)),
    "hybrid 2x1": Feature(mesh=(2, 1)),
    "hybrid 1x2": Feature(mesh=(1, 2)),
}

WORLD_SIZES = (2, 3, 4, 1)
"""Those that the cover prefers come first: two ranks are held to the bit, three are no power of two."""


class Cell(NamedTuple):
    """One cell of the matrix."""

    mode: str
    world_size: int
    feature: str

    @property
    def id(self) -> str:
        """As pytest shows it."""
        return f"{self.mode}-{self.world_size}-{self.feature.replace(' ', '_')}"


CELLS = [
    Cell(mode, world_size, name)
    for world_size in WORLD_SIZES
    for name, feature in FEATURES.items()
    for mode in MODES
    if feature.suits(mode, world_size)
]
