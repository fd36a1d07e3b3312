"""Reading trace files: every way of writing one, and every way in which one can be damaged or meant to harm."""

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.analyse import analyse
from refshard.errors import TraceError
from refshard.events.reader import read_events
from refshard.events.stream import EventStream
from refshard.events.table import TraceFile
from refshard.report.trace.answer import as_objects
from tests.analysis.builder import Training
from tests.analysis.handmade import event, shaped, step, write

HOSTILE_NAMES = ["},{", '"', "\\", '\\"},\n  {', "</script><b>&", "[[[", "}]", "éλ\u2028", "", "traceEvents"]


def kernel(name: str, start: int, duration: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration,
        "args": {"stream": 7, "device": 0, **args},
    }  # fmt: skip


def written(path: Path, events: list[dict[str, Any]], **metadata: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **metadata, "traceEvents": events, "traceName": "x"}))
    return path


def names(trace: TraceFile) -> list[str]:
    return [trace.names[code] for code in trace.device.names]


class Block(msgspec.Struct):
    """Any event, by its name."""

    name: str = ""


def streamed(path: Path) -> list[str]:
    """Names of all events, and so a proof that every block was cut between events."""

    def no_salvage(array: bytes) -> list[Block]:
        raise AssertionError(array)

    with EventStream(path, msgspec.json.Decoder(list[Block]), no_salvage, block=64) as stream:
        return [one.name for block in stream for one in block]


nested = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.sampled_from(HOSTILE_NAMES)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(HOSTILE_NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(st.sampled_from(HOSTILE_NAMES), nested), max_size=12),
    st.dictionaries(st.sampled_from(HOSTILE_NAMES[:-1]), nested, max_size=3),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
)
def test_blocks_are_cut_between_events_whatever_these_hold(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], metadata: dict[str, Any], indent: int, last: bool
) -> None:
    array = [{"args": args, "name": name, "more": [{"a": args}, {"b": name}]} for name, args in events]
    content = {**metadata, "traceEvents": array} if last else {"traceEvents": array, **metadata}
    path = tmp_path_factory.getbasetemp() / "cut.json"
    path.write_text(json.dumps(content, indent=indent))
    assert streamed(path) == [name for name, _ in events]


def test_every_way_of_writing_a_trace_reads_alike(tmp_path: Path) -> None:
    events = [kernel(name, 10 * i, 5) for i, name in enumerate(HOSTILE_NAMES)]
    whole = {"a": {"traceEvents": [1]}, "traceEvents": events, "distributedInfo": {"rank": 2}}
    texts = [
        json.dumps(whole).encode(), json.dumps(whole, indent=3).encode(), b"\xef\xbb\xbf" + json.dumps(whole).encode(),
        gzip.compress(json.dumps(whole).encode()), json.dumps(events).encode(),
    ]  # fmt: skip
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.json"
        path.write_bytes(text)
        trace = read_events(path)
        assert names(trace) == HOSTILE_NAMES
        assert trace.device.starts.tolist() == [10_000 * i for i in range(len(HOSTILE_NAMES))]
        assert trace.metadata.get("distributedInfo") == (None if number == 4 else {"rank": 2})


def test_the_schema_of_2021_reads_like_todays(tmp_path: Path) -> None:
    old = {
        "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Operator": "cpu_op",
        "Runtime": "cuda_runtime",
    }  # fmt: skip
    then, now = (
        read_events(
            written(
                tmp_path / f"{generation}.json",
                [
                    {"ph": "X", "cat": cat, "name": cat.lower(), "pid": 1, "tid": tid, "ts": 5, "dur": 2,
                     "args": {"correlation": 9, external: 4, "device": 0, "stream": 7}}
                    for cat in categories
                ],
            )
        )
        for generation, categories, tid, external in (
            ("then", old.keys(), "25738", "external id"), ("now", old.values(), 25738, "External id"),
        )
    )  # fmt: skip
    assert then.device.categories.tolist() == now.device.categories.tolist()
    assert then.device.externals.tolist() == now.device.externals.tolist() == [4, 4, 4]
    assert then.host.categories.tolist() == now.host.categories.tolist()
    assert then.threads == now.threads == (("1", "25738"),)


def test_numbers_that_json_does_not_know_are_absent_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = json.dumps({"traceEvents": [kernel("NaN inf", 1, 2, bandwidth=7), kernel("b", 3, 4)]})
    path.write_text(text.replace('"bandwidth": 7', '"bandwidth": -inf, "x": NaN').replace('"ts": 3', '"ts": nan'))
    trace = read_events(path)
    assert names(trace) == ["NaN inf"]
    assert trace.skipped == {"not_numbers": 3, "without_times": 1}


ONE, TWO = (json.dumps(kernel(name, start, 2)) for name, start in (("a,}", 1), ("b", 5)))


@pytest.mark.parametrize(("text", "skipped"), [
    (f"[{ONE}, {TWO},]", {"trailing_commas": 1}),
    (f'{{"traceEvents": [{ONE}, {TWO} ,\n], "traceName": "x",}}', {"trailing_commas": 2}),
    (f"[{ONE[:-2]},}},}},{TWO}]", {"trailing_commas": 2}), (f"[{ONE}, {TWO}", {"unclosed_array": 1}),
    (f"[{ONE},\n{TWO},\n", {"unclosed_array": 1}),
    (f"[{ONE}, {TWO[:-2]},}}}}, ", {"unclosed_array": 1, "trailing_commas": 1}),
])  # fmt: skip
def test_what_chrome_and_perfetto_allow_is_read(tmp_path: Path, text: str, skipped: dict[str, int]) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    trace = read_events(path)
    assert names(trace) == ["a,}", "b"]
    assert trace.skipped == skipped
    assert {one.code for one in analyse(path).figures.warnings} >= set(skipped)


@pytest.mark.parametrize(
    "text", [f"[{ONE}, {TWO[:-3]}", f"[{ONE}, {TWO[:30]}", f'{{"traceEvents": [{ONE}, {TWO}', "[{"]
)
def test_a_file_that_ends_within_an_event_or_an_object_is_truncated(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match="truncated: it ends within its events"):
        read_events(path)


def test_of_several_categories_the_first_known_counts(tmp_path: Path) -> None:
    events = [{**kernel(cat, 5 * i, 2), "cat": cat} for i, cat in enumerate(("kernel,foo", "foo, Kernel", "foo,bar"))]
    assert names(read_events(written(tmp_path / "t.json", events))) == ["kernel,foo", "foo, Kernel"]


def test_odd_events_are_left_out_and_counted(tmp_path: Path) -> None:
    events = [
        kernel("good", 1, 2), kernel("negative", 5, -1), {**kernel("no time", 0, 0), "ts": None},
        {**kernel("no name", 0, 0), "name": 7}, 7,
        {**kernel("odd arguments", 9, 1), "args": {"correlation": "seven", "stream": 3}},
        {**kernel("no arguments", 11, 1), "args": []}, kernel("last", 12, 1),
    ]  # fmt: skip
    trace = read_events(written(tmp_path / "t.json", events))  # type: ignore[arg-type]
    assert names(trace) == ["good", "odd arguments", "no arguments", "last"]
    assert trace.skipped == {
        "unusable_events": 2, "negative_durations": 1, "without_times": 1, "unusable_arguments": 2,
    }  # fmt: skip


def test_text_that_is_no_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(json.dumps({"traceEvents": [kernel("a?b", 1, 2)]}).encode().replace(b"?", b"\xff"))
    assert names(read_events(path)) == ["a\ufffdb"]


GOOD = json.dumps({"traceEvents": [kernel("a", 1, 2)], "traceName": "x"}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Kineto trace (it is empty)"), (b"  \n ", "not a Kineto trace (it is empty)"),
        (b"hello", "not a Kineto trace (it is no JSON object)"),
        (b'{"a": 1}', "not a Kineto trace (it has no traceEvents)"),
        (b'{"b": {"traceEvents": []}}', "not a Kineto trace (it has no traceEvents)"),
        (b'{"a": "trace', "not a Kineto trace (it ends before any traceEvents)"),
        (b'{"traceEvents": {}}', "not a Kineto trace (traceEvents must be an array)"),
        (b'{"traceEvents": [', "truncated: it ends within its events"),
        (GOOD[:40], "truncated: it ends within its events"),
        (GOOD[: GOOD.index(b"]")], "truncated: it ends within its events"),
        (GOOD[: GOOD.index(b"]") + 1], "truncated: it ends within its events"),
        (GOOD[:-1], "damaged before or after its events"), (GOOD.replace(b'"dur"', b'dur"'), "damaged at byte"),
        (b"[1, 2] 3", "damaged"), (b"[" * 5000, "damaged"), (b'{"traceEvents": [' + b'{"args":' * 5000, "damaged"),
        (gzip.compress(GOOD * 100)[:-20], "truncated or damaged gzip"),
        (gzip.compress(GOOD)[:10] + b"\0" * 50, "truncated or damaged gzip"),
    ],
    ids=range(18),
)  # fmt: skip
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_events(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_git_lfs_pointer_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    with pytest.raises(TraceError, match=r"t.json.gz: is a Git LFS pointer, .* git lfs pull"):
        read_events(path)


def test_an_array_of_other_things_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"file": "a.json.gz", "batch_size": 32}]')
    with pytest.raises(TraceError, match=r"not a Kineto trace \(none of its 1 elements is an event"):
        read_events(path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_events(tmp_path / "none.json")
    with pytest.raises(TraceError, match="is no regular file"):
        read_events(tmp_path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_events(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(TraceError, match="is no regular file"):
        read_events(tmp_path / "fifo.json")


@pytest.mark.processes
def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    events = b"," + b",".join([b'{"ph": "X"}'] * 100_000)
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [{"ph": "X"}')
        for _ in range(70):
            file.write(events)
    with pytest.raises(TraceError, match=r"of gzip expand to more than .* MiB, too much for a trace"):
        read_events(path)


@pytest.mark.parametrize(
    ("opening", "message"),
    [(b'{"a": "', "no events in its first"), (b'{"traceEvents": [{"name": "', "an event at byte 17 is longer than")],
)
@pytest.mark.full
def test_what_never_ends_is_given_up(tmp_path: Path, opening: bytes, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(opening + b"a" * 80 * 2**20)
    with pytest.raises(TraceError, match=message):
        read_events(path)


def peak_of_reading(path: Path) -> int:
    tracemalloc.start()
    trace = read_events(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.size == path.stat().st_size
    return peak


@pytest.mark.slow
def test_memory_grows_far_less_than_the_file(tmp_path: Path) -> None:
    one = kernel("a", 1, 1, padding="x" * 2000)
    small, large = (written(tmp_path / f"{count}.json", [one] * count) for count in (10_000, 30_000))
    more = large.stat().st_size - small.stat().st_size
    assert more > 40_000_000
    assert peak_of_reading(large) - peak_of_reading(small) < 0.1 * more


@pytest.mark.slow
def test_many_events_on_one_thread(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    one = '{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":%d,"dur":1}'
    path.write_text('{"traceEvents":[' + ",".join(one % i for i in range(300_000)) + "]}")
    trace = read_events(path)
    assert trace.count == len(trace.host.starts) == 300_000
    assert int(trace.host.ends[-1]) == 300_000_000


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    trace = read_events(write(tmp_path / "t.json", [event("a", 0.001, 0.002), event("b", 7.129, 1)]))
    assert (trace.host.ends - trace.host.starts).tolist() == [2, 1000]
    assert int(trace.host.starts[1] - trace.host.starts[0]) == 7128


def test_memory_events_are_kept_in_the_order_of_time(tmp_path: Path) -> None:
    args = {
        "Device Type": 1, "Device Id": 0, "Bytes": -512, "Addr": 4096, "Total Allocated": 512, "Total Reserved": 2048,
    }  # fmt: skip
    first = {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": 3, "args": {"Bytes": 8}}
    later = {**first, "tid": "2", "ts": 5, "args": args}
    trace = read_events(written(tmp_path / "t.json", [later, event_of(2), first, {**first, "name": "else"}]))
    found = trace.memory
    assert [trace.memory_devices[code] for code in found.devices] == ["cpu", "device 0"]
    assert [trace.threads[code] if code >= 0 else None for code in found.threads] == [None, ("1", "2")]
    columns = (found.times, found.changes, found.addresses, found.allocated, found.reserved)
    assert [column.tolist() for column in columns] == [[3000, 5000], [8, -512], [-1, 4096], [-1, 512], [-1, 2048]]


def event_of(thread: int) -> dict[str, Any]:
    """An operator on this thread, whose number the profiler writes as a number here and as text elsewhere."""
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": thread, "ts": 0, "dur": 1}


@pytest.mark.slow
def test_braces_without_end_cost_no_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + b"{" * 20_000_000))
    with pytest.raises(TraceError, match=r"damaged|truncated"):
        read_events(path)


def test_events_in_two_halves_and_in_two_arrays_are_not_lost_in_silence(tmp_path: Path) -> None:
    halves = [{**kernel("a", 1, 2), "ph": phase} for phase in "BE"]
    assert read_events(written(tmp_path / "t.json", [*halves, kernel("b", 3, 4)])).skipped == {"begin_and_end_pairs": 1}
    (tmp_path / "two.json").write_text('{"traceEvents": [], "traceEvents": []}')
    with pytest.raises(TraceError, match="holds traceEvents twice"):
        read_events(tmp_path / "two.json")


def test_one_odd_argument_costs_no_other(tmp_path: Path) -> None:
    odd = {"Collective name": None, "correlation": "12", "External id": 2**64 - 1, "stream": 5, "grid": [1, 2, 3]}
    trace = read_events(written(tmp_path / "t.json", [{**kernel("a", 1, 2), "pid": 0.5, "args": odd}]))
    assert (trace.device.correlations.tolist(), trace.device.externals.tolist()) == ([12], [-1])
    assert trace.lanes == (("0.5", "5"),)
    assert trace.signatures == ("a [1,2,3] ",)
    assert trace.skipped == {"unusable_arguments": 1}


SEEDS = {
    "gpu": lambda path: Training(layers=1, steps=1).trace().write(path).read_bytes(),
    "cpu": lambda path: write(path, [step(0, 0, 9), event("gloo:all_reduce", 1, 2, cat="user_annotation", tid=2,
                              **shaped([[3]], ["float"])), event("aten::mm", 3, 4)]).read_bytes(),
}  # fmt: skip
JUNK = [
    b"9" * 30, b"-", b"e99", b"null", b"[", b"{", b"}", b"]", b'"', b"\\", b"NaN", b",", b"\0", b"\xff", b"1e400", b"",
]  # fmt: skip


def outcome(path: Path) -> str:
    try:
        json.dumps(as_objects([analyse(path).figures]), allow_nan=False)
    except TraceError as error:
        return str(error)
    return "figures"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_damaged_ends_in_one_line_or_in_figures(tmp_path: Path, seed: str) -> None:
    """Bytes put in, taken out, doubled and cut off, at random from a fixed start; a cut file gives no figures."""
    path, chance = tmp_path / "t.json", random.Random(5)
    whole = SEEDS[seed](path)
    for number in range(400):
        at, length = chance.randrange(len(whole)), chance.randrange(60)
        inside = chance.choice(JUNK) if number % 3 else whole[at : at + length] * 2
        cut = number % 4 == 3
        path.write_bytes(whole[:at] if cut else whole[:at] + inside + whole[at + length :])
        told = outcome(path)
        assert "\n" not in told
        assert not (cut and told == "figures")
