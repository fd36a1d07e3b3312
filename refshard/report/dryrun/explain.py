"""Why a real run ran out of memory: what held it, where it departs from a dry run, and what would make it fit."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from refshard.dryrun.advice import Advice
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.explain import Departure, Explanation, Part, RealRun, scaled
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.plain import plain
from refshard.quantities import MIB, format_bytes, format_percent
from refshard.report.blocks import Answer, Block, Notes, Quantity, Row, Section, Verdict, table
from refshard.report.dryrun.advice import advice_blocks
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.dryrun.categories import CATEGORIES
from refshard.report.trace.snapshot import failure_sentences

_SHOWN, _NAMED = 10, 4
_OUTSIDE = 256 * MIB
"""Memory outside the allocator, over the estimate, from which on it is named."""
_KEPT = "Something keeps them from step to step, such as a list or a loss with its graph: keep .item() or .detach()."


def explained_answer(
    real: RealRun, found: Analysis, explanation: Explanation, advice: Advice | None, more: str = ""
) -> Answer:
    """The explanation, and the dry run's own report folded behind it. The status is the dry run's."""
    answer = dryrun_answer(found, more, advice=advice)
    advised = [] if advice is None else advice_blocks(advice, fits=found.fits is not False)
    first, *rest, last = answer.blocks
    assert isinstance(last, Verdict)
    failure, departs = list(_failure(real)), bool(explanation.departures)
    causes = [plain(sentence) for sentence in _causes(real, found, explanation)]
    parts: list[Row] = [
        {"held for": "-" if part.category is None else CATEGORIES[part.category], "in": plain(_module(part)),
         "real run": Quantity(part.bytes, "B"), "blocks": part.blocks,
         "dry run's peak": Quantity(part.predicted_bytes, "B")}
        for part in explanation.parts[:_SHOWN]
    ]  # fmt: skip
    when = "at the failing allocation" if real.failed else "at the end of the snapshot"
    title = f"{real.name}: held {when}, by purpose and module (known from the dry run)"
    blocks: list[Block] = [
        table(parts, left=2, title=plain(title)),
        Notes(title="Where the real run departs from the dry run", sentences=causes),
        *advised,
        Section(
            title="The dry run", id="dryrun", nav="Dry run", where="detail", blocks=rest[: len(rest) - len(advised)]
        ),
    ]
    data = {**answer.data, "explanation": {**msgspec.to_builtins(explanation), "departs": causes}}
    verdict = Verdict(sentences=[*failure[:1], *causes[:1], *failure[1:], *_predicted(last, departs)], style="bad")
    return replace(answer, data=data, blocks=[first, *blocks, verdict])


def _module(part: Part) -> str:
    return (
        (part.module or "outside modules")
        if part.category is not None
        else "unknown (a line or size not in the dry run)"
    )


def _failure(real: RealRun) -> Iterator[str]:
    history, failure = real.device.history, real.device.failure
    if history is None or failure is None:
        yield "No allocation failed in the snapshot: this is its end."
    else:
        yield from map(plain, failure_sentences(history.ooms, failure, real.device.free_blocks, real.settings))


def _predicted(verdict: Verdict, departs: bool) -> list[str]:
    """The dry run's verdict on memory, and the remedies that make it fit."""
    fits, *others = verdict.sentences
    return [f"Dry run{', without that' if departs else ''}: {fits}", *(o for o in others if o.startswith("Fits with"))]


def _causes(real: RealRun, found: Analysis, explanation: Explanation) -> Iterator[str]:
    """Where the real run departs from the dry one, the most bytes first."""
    if not explanation.parts:
        yield (
            f"Not compared: only {format_percent(explanation.matched, 0)} of the snapshot's memory was allocated at "
            "lines of this script. Dry-run the script that wrote the snapshot, unchanged."
        )
        return
    alike = scaled(explanation)
    others = [one for one in explanation.departures if one not in alike]
    sentences = [(one.bytes, _departure(one)) for one in others if one.kind != "new"]
    if explanation.scale is not None and alike:
        sentences.append((sum(one.bytes for one in alike), _larger(alike, explanation.scale)))
    if new := [one for one in others if one.kind == "new"]:
        sentences.append((sum(one.bytes for one in new), _new(new)))
    yield from (sentence for _, sentence in sorted(sentences, reverse=True))
    yield from _outside(found, explanation)
    if real.may_hold_early and real.device.failure is not None:
        size = format_bytes(real.device.failure.early_bytes)
        yield f"{size} were there before the history began, and have no line: start it before the model is made."
    if not sentences:
        held, predicted = format_bytes(explanation.held_bytes), format_bytes(explanation.predicted_bytes)
        yield f"Every line holds at most what it holds in the dry run ({held} held; the dry run's peak is {predicted})."
    other = found.run.answer.other_segments
    if found.fits and other is not None and other.expandable:
        now, then = format_bytes(found.run.answer.peak.reserved), format_bytes(other.reserved)
        yield f"With {EXPANDABLE_SEGMENTS} the dry run reserves {then}, without it {now}."


def _departure(one: Departure) -> str:
    line = one.line or "Autograd, at no line of the script,"
    alike = one.bytes == one.blocks * one.largest
    sizes = f"of {format_bytes(one.largest)}" if alike else f"of up to {format_bytes(one.largest)}"
    what = "" if one.category is None else f"{CATEGORIES[one.category]}{f' in {one.module}' if one.module else ''}, "
    holds = f"{line} holds {one.blocks:,} blocks {sizes} ({what}{format_bytes(one.bytes)}); the dry run"
    if one.kind == "larger":
        return f"{holds} none over {format_bytes(one.predicted_largest)}."
    why = f" {_KEPT}" if one.line else ""
    grows = f" The dry run keeps {one.grows:,} more each step, too." if one.grows else ""
    return f"{holds} at most {one.predicted_blocks:,}.{why}{grows}"


def _larger(alike: tuple[Departure, ...], scale: float) -> str:
    first, total = alike[0], format_bytes(sum(one.bytes for one in alike))
    return (
        f"Blocks of {_lines(len(alike))} ({total}) are {scale:g} times as large as the dry run's, such as "
        f"{first.line or 'those of autograd'}: {format_bytes(first.largest)}, not "
        f"{format_bytes(first.predicted_largest)}. The real run has a larger or longer batch."
    )


def _new(new: list[Departure]) -> str:
    named = ", ".join(f"{one.line} ({format_bytes(one.bytes)})" for one in new[:_NAMED])
    more = f" and {_lines(len(new) - _NAMED)} more" if len(new) > _NAMED else ""
    total = format_bytes(sum(one.bytes for one in new))
    return f"{total} are held at {_lines(len(new))} where the dry run allocates nothing: {named}{more}."


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def _outside(found: Analysis, explanation: Explanation) -> Iterator[str]:
    """Memory of the GPU that is not this process's allocator's."""
    outside, modelled = explanation.outside_bytes, found.outside_bytes
    if outside is None:
        return
    total = format_bytes(found.hardware.memory_bytes)
    if outside < 0:
        yield f"The snapshot is of a GPU with more memory than the {total} of this cluster's: choose its own cluster."
    elif outside > modelled + _OUTSIDE:
        yield (
            f"{format_bytes(outside)} of the GPU's {total} are neither free nor the allocator's, "
            f"{format_bytes(outside - modelled)} more than the estimate for CUDA's context and NCCL: another process, "
            "or a library that allocates by itself. See nvidia-smi."
        )
