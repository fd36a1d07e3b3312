"""The JSON schema of ``refshard trace --json``: it describes what is printed, and keys that programs read stay."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refshard.analysis.figures import TraceFigures
from refshard.report.forms import SCHEMA_VERSION
from refshard.report.trace.schema import trace_schema
from tests.commands.conftest import Command

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "trace_schema.txt"
TRACES = [ROOT / "docs/examples/trace_fsdp2.json.gz", ROOT / "tests/analysis/others/hta_cpu_only_gloo.json.gz"]
pytestmark = pytest.mark.slow


def keys(schema: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key: the object that has it, its name and its type."""
    for name, about in sorted(schema["$defs"].items()):
        for key, value in about.get("properties", {}).items():
            yield f"{name}.{key}: {type_of(value)}"


def type_of(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        return str(value["$ref"].rpartition("/")[2])
    if "anyOf" in value:
        return " or ".join(map(type_of, value["anyOf"]))
    kind = str(value.get("type", "text"))
    return f"{kind} of {type_of(value['items'])}" if isinstance(value.get("items"), dict) else kind


def test_keys_stay_within_a_version(request: pytest.FixtureRequest) -> None:
    """New keys are kept from the next ``pytest tests/commands/test_trace_schema.py --accept`` on."""
    now = [f"version {SCHEMA_VERSION}", *keys(trace_schema())]
    if request.config.getoption("--accept"):
        KEPT.write_text("\n".join(now) + "\n")
    kept = KEPT.read_text().splitlines()
    assert not set(kept) - set(now), "a key went or changed its type: raise SCHEMA_VERSION and --accept"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_what_is_printed_has_the_keys_of_the_schema(refshard: Command, path: Path) -> None:
    printed = json.loads(refshard("trace", str(path), "--json").stdout)
    defined = trace_schema()["$defs"]
    assert printed.keys() == defined["Answer"]["properties"].keys()
    (one,) = printed["traces"]
    assert one.keys() == defined["Trace"]["properties"].keys()
    assert one["steps"][0].keys() == defined["Step"]["properties"].keys()
    assert one["collectives"][0].keys() == defined["CollectiveFigures"]["properties"].keys()
    # What is nested as it is computed reads back.
    own = {key: value for key, value in one.items() if key in TraceFigures.__struct_fields__}
    assert msgspec.convert({**own, "whole": one, "steps": []}, type=TraceFigures).file == str(path)


def test_the_command_prints_the_schema_without_a_trace(refshard: Command) -> None:
    done = refshard("trace", "--json-schema")
    assert (done.returncode, done.stdout) == (0, json.dumps(trace_schema(), indent=2) + "\n")
