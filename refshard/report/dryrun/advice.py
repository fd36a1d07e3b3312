"""What would make a dry run fit, or use the memory that it leaves, as sentences."""

from collections.abc import Iterator
from typing import Any

import msgspec

from refshard.dryrun.advice import Advice, Remedy
from refshard.quantities import format_bytes
from refshard.report.blocks import Block, Notes


def advice_blocks(advice: Advice, *, fits: bool) -> list[Block]:
    """What was tried, then what the script's author can change; nothing where there is nothing to say."""
    title = "Tried, to use what is left" if fits else "What would fit"
    sentences = list(_sentences(advice, fits=fits))
    return [Notes(title=title, sentences=sentences)] if sentences else []


def _sentences(advice: Advice, *, fits: bool) -> Iterator[str]:
    enough = [one for one in advice.remedies if one.tried.fits]
    yield from (f"{one.change}: fits, {_memory(one)}{_speed(one)} (dry-run)" for one in enough)
    if vain := [one for one in advice.remedies if not one.tried.fits]:
        listed = ", ".join(
            f"{one.change} ({_memory(one) if one.tried.reserved_bytes else 'no answer'})" for one in vain
        )
        yield f"Tried, and not enough: {listed}."
    if advice.together:
        yield "Inside the script, not tried: no single change is enough, but these together may be."
    for saving in advice.savings:
        yield (
            f"{'' if advice.together else 'Inside the script, not tried: '}{saving.what}, "
            f"{format_bytes(saving.held_bytes)} at the peak: {saving.change} frees up to "
            f"{format_bytes(saving.frees_bytes)}."
        )
    if not fits and not enough and not advice.savings:
        yield "Nothing known is enough: the model needs more or larger GPUs, or fewer layers."


def _memory(one: Remedy) -> str:
    return f"{format_bytes(one.tried.reserved_bytes)} of {format_bytes(one.tried.usable_bytes)}"


def _speed(one: Remedy) -> str:
    return "" if one.tried.tokens_per_s is None else f", {one.tried.tokens_per_s:,.0f} tokens/s/GPU"


def advice_as_object(advice: Advice) -> dict[str, Any]:
    """For ``--json``; bytes and seconds."""
    return {
        "tried": [{"change": one.change, **msgspec.to_builtins(one.tried)} for one in advice.remedies],
        "not_tried": [msgspec.to_builtins(saving) for saving in advice.savings],
        "together": advice.together,
    }
