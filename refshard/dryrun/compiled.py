"""What torch.compile did in a script's process: graphs, graph breaks and recompilations, with their lines."""

import sys
from collections import Counter
from typing import Any

from refshard.dryrun.request import Compilation, Place
from refshard.fakecuda.torch_c import is_internal, short


def compilation() -> Compilation | None:
    """None if the script compiled nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
    if dynamo is None or not graphs:
        return None
    recompiled = [found for found in dynamo.get_compilation_metrics() if found.recompile_reason and found.co_filename]
    return Compilation(
        graphs=graphs,
        breaks=_places((_line_of(reason.user_stack), reason.reason) for reason in dynamo.graph_break_reasons),
        recompiled=_places(
            (f"{short(one.co_filename)}:{one.co_firstlineno} in {one.co_name}", _guard(one.recompile_reason))
            for one in recompiled
        ),
    )


def _places(found: Any) -> tuple[Place, ...]:
    """By line and reason, the most frequent first."""
    counts = Counter((line, reason.strip().splitlines()[0].strip()) for line, reason in found)
    return tuple(Place(line=line, reason=reason, count=count) for (line, reason), count in counts.most_common())


def _line_of(stack: Any) -> str:
    """The innermost line of the script's own, as ``train.py:31 in forward``."""
    frames = [frame for frame in stack if not is_internal(frame.filename)] or list(stack)
    return f"{short(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else "inside torch"


def _guard(reason: str) -> str:
    """The guard that failed, without the number of the graph that it belongs to: ``0/0: tensor 'x' size mismatch``."""
    line = reason.strip().splitlines()[-1].strip().lstrip("- ")
    head, _, rest = line.partition(": ")
    return rest if rest and head.replace("/", "").isdigit() else line
