"""Doubts about a report of Nsight Systems, with remedies of that recorder."""

from collections.abc import Iterable, Iterator

import msgspec

from refshard.events.table import TraceFile
from refshard.tracing.figures import TraceWarning

_MESSAGES = {
    "no_rank": "a report of Nsight Systems names no rank; name the file after it, such as rank0.sqlite",
    "no_steps": "no range ProfilerStep#: the report is taken as one window; put every step in a range: "
    "torch.cuda.nvtx.range(f'ProfilerStep#{step}')",
    "no_process_group_metadata": "a report of Nsight Systems names no process groups: no bus bandwidth",
    "no_collective_sizes": "no sizes of collectives: a report of Nsight Systems keeps them in payloads that are not "
    "read; a Kineto trace with record_shapes=True has them",
}


def in_words_of(trace: TraceFile, warnings: Iterable[TraceWarning]) -> Iterator[TraceWarning]:
    """The same doubts; about a report, with what helps there."""
    is_report = trace.metadata.get("recorder") == "Nsight Systems"
    for warning in warnings:
        message = _MESSAGES.get(warning.code) if is_report else None
        if message is None:
            yield warning
            continue
        _, hint, more = warning.message.partition("; or use --window")
        yield msgspec.structs.replace(warning, message=message + hint + more)
