"""The common recipe of fine-tuning by adapters (QLoRA's, and peft's examples')."""

import msgspec


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of ``rank`` on every linear layer of a block, scaled by ``alpha / rank``, behind ``dropout``."""

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


LORA = Lora()
