"""The JSON schema of ``refshard trace --json``, made of the structs that its answer is made of."""

from types import GenericAlias
from typing import Any, Literal, get_type_hints

import msgspec

from refshard.analysis.figures import Breakdown, StepFigures, TraceFigures
from refshard.report.forms import SCHEMA_VERSION

_Fields = dict[str, Any]


def trace_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of what is printed of traces; comparisons and memory snapshots have other keys.

    Keys may be added within a version. See :func:`refshard.report.trace.answer.as_objects`.
    """
    hints = get_type_hints(Breakdown)
    # Only the length is known if the device's events are missing.
    breakdown: _Fields = {name: hint if name == "span_ns" else hint | None for name, hint in hints.items()}
    step = _struct("Step", {**breakdown, **_without(StepFigures, "breakdown")})
    own = {**_without(TraceFigures, "whole"), "steps": GenericAlias(list, (step,)), "giveway_index": float | None}
    trace = _struct("Trace", {**breakdown, **own})
    about = {"schema_version": Literal[SCHEMA_VERSION], "command": Literal["trace"]}
    schema = msgspec.json.schema(
        _struct("Answer", {**about, "verdict": list[str], "traces": GenericAlias(list, (trace,))})
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "refshard trace --json", **schema}


def _without(struct: type[msgspec.Struct], name: str) -> _Fields:
    return {key: hint for key, hint in get_type_hints(struct).items() if key != name}


def _struct(name: str, fields: _Fields) -> Any:
    return msgspec.defstruct(name, list(fields.items()), kw_only=True)
