"""What it costs to keep a record: to append one, synced to the disk before the next launch, and to read 10,000 back.

The record is one that a machine left (``profiles/recorded``), with its raw samples and its proof. Where pytest's
temporary folder is in memory, a sync costs nothing: ``--basetemp`` puts it on the disk in question.

    pytest suites/bench_store.py --benchmark-json=store.json
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from refshard import resources
from refshard.measure.store import RECORDS, RunWriter, read_run
from refshard.records import LaunchRecord, RunRecord

RECORDED = resources.root() / "profiles" / "recorded" / "xeon-2-cores" / "engine"
MANY = 10_000
APPENDED = 1_000


def launches() -> tuple[RunRecord, Iterator[LaunchRecord]]:
    """A header, and as many launches as one likes, which differ in their round."""
    run = read_run(RECORDED)
    record = next(record for record in run.launches if record.state == "ok")
    return run.header, (msgspec.structs.replace(record, round=at) for at in itertools.count())


def test_append(benchmark: Any, tmp_path: Path) -> None:
    """One record at a time, synced."""
    header, records = launches()
    with RunWriter(tmp_path / "run") as writer:
        writer.append(header)
        rounds = 1 if benchmark.disabled else APPENDED
        benchmark.pedantic(writer.append, setup=lambda: ((next(records),), {}), rounds=rounds)
    run = read_run(tmp_path / "run")
    benchmark.extra_info.update(records=len(run.launches), bytes=(tmp_path / "run" / RECORDS).stat().st_size)
    assert [record.round for record in run.launches] == list(range(rounds))


def test_read_back(benchmark: Any, tmp_path: Path) -> None:
    """All records of a run, each held against its check."""
    header, records = launches()
    many = 100 if benchmark.disabled else MANY
    with RunWriter(tmp_path / "run") as writer:
        writer.append(header)
        for record in itertools.islice(records, many):
            writer.append(record)
    run = benchmark.pedantic(read_run, args=(tmp_path / "run",), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(records=many, bytes=(tmp_path / "run" / RECORDS).stat().st_size)
    assert [record.round for record in run.launches] == list(range(many))
