"""``refshard trace`` as a user meets it: what it prints, what it refuses, and how it ends."""

import json
from pathlib import Path

import pytest

from refshard.commands.trace import trace
from refshard.errors import SpecError, TraceError
from refshard.events.table import DRY_RUN, WRITER
from tests.analysis import snapshots
from tests.analysis.handmade import event, shaped, step, write
from tests.analysis.inference import inference
from tests.commands.conftest import Command
from tests.events.nsys_export import Export
from tests.report.pages import Page
from tests.report.printed import as_csv, as_json, notes, rows, tables, text, verdict

pytestmark = pytest.mark.slow


def rank_of_a_job(path: Path, rank: int, *, late: float, compute: float = 30) -> Path:
    """Two gloo ranks: one all-reduce that both leave at 90, entered at 40 + ``late``; compute from 10 on."""
    entered = 40 + late
    write(
        path,
        [
            step(1, 0, 100),
            event("aten::mm", 10, compute),
            event("c10d::allreduce_", entered - 1, 1, **shaped([[[25]], []], ["TensorList", ""])),
            event("gloo:all_reduce", entered, 90 - entered, cat="user_annotation", tid=2, **shaped([[25]], ["float"])),
        ],
        rank=rank,
    )
    path.write_text(path.read_text().replace('"rank"', '"backend": "gloo", "world_size": 2, "rank"'))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ranks of one job, a file that is no trace, and one that is none's business: the current folder."""
    monkeypatch.chdir(tmp_path)
    for rank, late in ((0, 0), (1, 20)):
        rank_of_a_job(tmp_path / f"rank{rank}.json", rank, late=late)
    (tmp_path / "case.json").write_text('{"a": 1}')
    (tmp_path / "notes.txt").write_text("hello")
    return tmp_path


def test_large_files_are_analysed_side_by_side_with_the_same_answer(refshard: Command, folder: Path) -> None:
    small = refshard("trace", str(folder), "--json")
    for path in folder.glob("rank*.json"):
        path.write_text(path.read_text() + " " * 2**23)
    large = refshard("trace", str(folder), "--json")
    assert large.stdout == small.stdout
    assert "1 of 3 files analysed" in large.stderr
    assert "skipped" in large.stderr


def test_json_has_one_object_per_trace(refshard: Command, folder: Path) -> None:
    done = refshard("trace", str(folder), "--json")
    first, second = json.loads(done.stdout)["traces"]
    assert done.returncode == 0
    assert done.stderr == f"refshard: skipped {folder}/case.json: not a Kineto trace (it has no traceEvents)\n"
    wanted = {"span_ns": 100_000, "compute_ns": 30_000, "comm_ns": 50_000, "exposed_ns": 50_000, "overlap_ratio": 0.0,
              "idle_ns": 20_000, "giveway_index": None, "rank": 0, "world_size": 2, "job": 0}  # fmt: skip
    assert {key: first[key] for key in wanted} == wanted
    assert (second["rank"], second["job"], second["comm_ns"]) == (1, 0, 30_000)
    assert (first["steps"][0]["step"], first["collectives"][0]["bytes"]) == (1, 100)
    assert first["waits_for"] == [{"rank": 1, "waited_ns": 20_000, "collectives": 1}]


def test_the_table_reads_without_the_files_names(folder: Path) -> None:
    found = trace([folder])
    (table, *_) = tables(found)
    assert table.title.endswith("2 of 2 ranks, gloo, cpu (rank*.json)")
    assert [(row["rank"], row["compute"]) for row in rows(table)] == [("0", "30.0 us (30 %)"), ("1", "30.0 us (30 %)")]
    assert verdict(found)[0].startswith("The largest loss is exposed communication: 40.0 % of a step of 100 us")
    assert as_json(found)["verdict"] == verdict(found)
    assert "Rank 1 comes last to the only collective, and rank 0 waits 20.0 us a step for it" in verdict(found)[0]
    assert "rank0.json" not in text(found)


def test_files_are_one_job_only_if_they_say_so_or_are_told(folder: Path) -> None:
    stranger = rank_of_a_job(folder / "stranger.json", 1, late=30)
    stranger.write_text(stranger.read_text().replace("gloo", "nccl", 1))
    paths = [folder / "rank0.json", stranger]
    jobs = [one["job"] for one in as_json(trace(paths))["traces"]]
    assert jobs == [0, 1]
    told = as_json(trace(paths, one_job=True))["traces"]
    assert [one["job"] for one in told] == [0, 0]
    assert told[0]["waits_for"] == [{"rank": 1, "waited_ns": 30_000, "collectives": 1}]
    with pytest.raises(TraceError, match="--job takes each rank once"):
        trace([folder / "rank1.json", stranger], one_job=True)


def test_a_difference_adds_up_to_the_change_in_step_time_and_is_a_page_too(folder: Path) -> None:
    slower, page = rank_of_a_job(folder / "slower.json", 0, late=0, compute=45), folder / "d.html"
    answer = trace([folder / "rank0.json"], against=slower, page=page)
    found = as_json(answer)
    changes = {(one["kind"], one["label"]): one["delta_ns"] for one in found["changes"]}
    assert (changes["compute", "aten::mm"], changes["comm", "all_reduce 100 B"]) == (15_000, -15_000)
    assert sum(changes.values()) == found["delta_ns"] == found["b_ns"] - found["a_ns"] == 0
    sides = [f"{side}: {folder}/{name}.json, 1 step of 100 us" for side, name in (("A", "rank0"), ("B", "slower"))]
    assert text(answer).startswith("\n".join(sides))
    assert text(answer).endswith(f"page: {page}")
    assert len(as_csv(answer)) == len(found["changes"])
    shown = Page(page.read_text()).text.replace("\N{NO-BREAK SPACE}", " ")
    assert all(sentence in shown for sentence in verdict(answer))
    charts = [box["id"] for box in Page(page.read_text()).having("div") if box.get("class") == "chart"]
    assert charts[0] == "sides"
    assert {"side-0-timeline-0", "side-1-timeline-0"} <= set(charts)
    with pytest.raises(SpecError, match="is one of the traces, which the page would overwrite"):
        trace([folder / "rank0.json"], against=slower, page=slower)


def job(folder: Path, ranks: dict[int, float], size: int = 2) -> Path:
    """A folder with the traces of these ranks, each with so many microseconds of compute."""
    folder.mkdir()
    for rank, compute in ranks.items():
        path = rank_of_a_job(folder / f"rank{rank}.json", rank, late=0, compute=compute)
        path.write_text(path.read_text().replace('"world_size": 2', f'"world_size": {size}'))
    return folder


def test_all_ranks_are_compared_by_number_or_as_means(tmp_path: Path) -> None:
    a, b = job(tmp_path / "a", {0: 30, 1: 30, 2: 30}), job(tmp_path / "b", {1: 32, 2: 41, 3: 70})
    answer = trace([a], against=b)
    found = as_json(answer)
    changes = {one["label"]: (one["delta_ns"], one["most_rank"], one["most_ns"]) for one in found["changes"]}
    assert changes["aten::mm"] == (6_500, 2, 11_000)
    assert [one["rank"] for one in found["ranks"]] == [1, 2]
    assert text(answer).startswith(f"A: {a} (2 ranks), 1 step of 100 us, mean of 2 ranks\nB: {b} (2 ranks)")
    assert {"Left out: rank 0, only in A.", "Left out: rank 3, only in B."} <= set(notes(answer))
    answer = trace([a], against=job(tmp_path / "c", {0: 35, 1: 36, 2: 40, 3: 33}, size=4))
    found = as_json(answer)
    assert {one["label"]: one["delta_ns"] for one in found["changes"]}["aten::mm"] == 6_000
    assert found["ranks"] == []
    means = "The world sizes differ, so ranks are not matched: the means of 3 of A's ranks and of 4 of B's ranks are "
    assert any(note.startswith(means) for note in notes(answer))
    assert "Not like for like: A and B differ in world size (2 and 4)." in notes(answer)


def test_a_difference_needs_two_jobs_with_a_rank_in_common(folder: Path) -> None:
    assert verdict(trace([folder / "rank0.json", folder / "rank1.json"], against=folder)) == ["No difference."]
    several = folder / "several"
    several.mkdir()
    for name in ("t.json", "u.json"):
        rank_of_a_job(several / name, 0, late=0)
    with pytest.raises(TraceError, match=r"compares two jobs, but B holds 2, with [tu].json, [tu].json; name one file"):
        trace([folder / "rank0.json"], against=several)
    with pytest.raises(TraceError, match="they have none in common; name one file of each"):
        trace([job(folder / "a", {0: 30, 1: 30})], against=job(folder / "b", {2: 30, 3: 30}))


def test_what_one_side_does_not_record_is_named(folder: Path) -> None:
    (one,) = (note for note in notes(trace([folder / "rank0.json"], against=folder / "rank1.json")) if "record" in note)
    assert one.startswith(
        "A and B record no input shapes (record_shapes=True): operators are matched by name and order"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "cannot be read (No such file or directory)"),
        (["case.json"], "not a Kineto trace (it has no traceEvents)"),
        (["empty"], "holds no trace; traces end in .json, .json.gz or .sqlite"),
        (["rank0.json", "--cross-check", "hat"], "cross-check must be 'hta', got 'hat'"),
        (
            ["rank0.json", "--against", "rank1.json", "--cross-check", "hta"],
            "against: cannot be combined with --cross-check; run the command twice",
        ),
        (["rank0.json", "--window", "decode("], "window: 'decode(' is no regular expression"),
        (["rank0.json", "--window", "decode"], "--window 'decode' matches no annotation; the most frequent are: "),
        (
            ["rank0.json", "--gpu", "1"],
            "--gpu 1 is not in the trace; its GPUs: none (a CPU trace)",
        ),
        (["rank0.json", "--calibration", "notes.txt"], "not a Kineto trace (it is no JSON object)"),
    ],
)
def test_a_mistake_is_one_line(refshard: Command, folder: Path, arguments: list[str], message: str) -> None:
    (folder / "empty").mkdir()
    done = refshard("trace", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_windows_take_the_place_of_steps(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = trace([inference(tmp_path / "engine.json")], window=r"step\[", page=page)
    for part in ("1: step[DECODE bs=8]", "step[DECODE bs=#]", "per window, mean of 3"):
        assert part in page.read_text()
    by_job, by_kind, *_ = tables(found)
    assert rows(by_job)[0]["windows"] == "3"
    assert rows(by_job)[0]["per window"] == "23.3 us"
    assert [list(row.values()) for row in rows(by_kind)] == [
        ["step[EXTEND bs=2 toks=900]", "1", *["50.0 us"] * 3, "30.0 us (60 %)", *["10.0 us (20 %)"] * 3],
        ["step[DECODE bs=#]", "2", *["10.0 us"] * 3, "5.50 us (55 %)", *["0 s (0 %)"] * 2, "4.50 us (45 %)"],
    ]
    assert verdict(found)[0].endswith("of a window of 23.3 us.")
    b = inference(tmp_path / "b.json")
    b.write_text(b.read_text().replace('"dur": 6', '"dur": 8'))
    found = trace([tmp_path / "engine.json"], against=b, window="DECODE")
    assert as_json(found)["delta_ns"] == 1000  # 2 us in one of two decodes


def test_a_folder_of_exports_is_read_and_hta_is_not_asked(tmp_path: Path) -> None:
    export = Export("2026.4")
    export.kernel("gemm", 5, 9, 1)
    export.call("cudaLaunchKernel_v7000", 1, 2, 1)
    path = export.write(tmp_path / "rank3.sqlite")
    (one,) = as_json(trace([tmp_path]))["traces"]
    assert (one["rank"], one["compute_ns"]) == (3, 4)
    with pytest.raises(SpecError, match=r"HTA reads Kineto traces only; leave out .*rank3\.sqlite, an export of nsys"):
        trace([path], cross_check="hta")


def test_a_run_keeps_its_traces_apart_and_a_file_named_twice_is_one(refshard: Command, folder: Path) -> None:
    (folder / "traces").mkdir()
    (folder / "rank1.json").rename(folder / "traces" / "rank1.json")
    assert [one["rank"] for one in as_json(trace([folder / "rank0.json", folder, folder]))["traces"]] == [0, 1]
    (folder / "records.jsonl").touch()
    done = refshard("trace", str(folder), "--json")
    assert [one["rank"] for one in json.loads(done.stdout)["traces"]] == [1]
    assert done.stderr == ""


def test_one_bad_file_does_not_end_the_others(refshard: Command, folder: Path) -> None:
    """Of files named and of folders alike; status 2 only where nothing could be analysed."""
    (folder / "empty").mkdir()
    bad = ["case.json", "missing.json", "empty"]
    whole = (folder / "rank1.json").read_bytes()
    (folder / "damaged.json").write_bytes(whole[: len(whole) // 2])
    bad.append("damaged.json")
    done = refshard("trace", *bad[:2], "rank0.json", *bad[2:], "rank1.json", "--json")
    assert done.returncode == 0
    assert "damaged.json: truncated: it ends within its events" in done.stderr
    assert [one["rank"] for one in json.loads(done.stdout)["traces"]] == [0, 1]
    assert sorted(line.split()[2].rstrip(":") for line in done.stderr.splitlines()) == sorted(bad)
    nothing = refshard("trace", *bad)
    assert nothing.returncode == 2
    assert nothing.stdout == ""
    *reasons, last = nothing.stderr.splitlines()
    assert len(reasons) == 4
    assert last == "refshard: none of 4 files and folders could be analysed, for the reasons above"


def test_a_trace_without_host_events_does_not_end_the_others(folder: Path) -> None:
    gemm = event("gemm", 5, 10, cat="kernel", tid=7, stream=7, device=0, correlation=3)
    write(folder / "bare.json", [gemm], rank=1)
    found = as_json(trace([folder / "bare.json", folder / "rank0.json"]))["traces"]
    assert [one["compute_ns"] for one in found] == [10_000, 30_000]
    assert found[0]["idle_launch_ns"] is None
    assert [one["code"] for one in found[0]["warnings"]] == ["no_steps", "launches_missing"]


def test_kernels_of_ones_own_communicate(refshard: Command, folder: Path) -> None:
    ring = event("my_ring(float*)", 5, 10, cat="kernel", tid=7, stream=7, device=0, correlation=3)
    write(folder / "own.json", [ring])
    done = refshard("trace", "own.json", "--communication", "no such", "--communication", "RING", "--json")
    assert json.loads(done.stdout)["traces"][0]["comm_ns"] == 10_000
    wrong = refshard("trace", "own.json", "--communication", "ring(")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "communication: 'ring(' is no regular expression" in wrong.stderr


def test_a_page_does_not_overwrite_a_trace(folder: Path) -> None:
    before = (folder / "rank0.json").read_bytes()
    with pytest.raises(SpecError, match="is one of the traces, which the page would overwrite"):
        trace([folder / "rank0.json"], page=folder / "." / "rank0.json")
    assert (folder / "rank0.json").read_bytes() == before
    with pytest.raises(SpecError, match=r"html: .* cannot be written"):
        trace([folder / "rank0.json"], page=folder / "none" / "t.html")


def test_names_cannot_steer_the_terminal(folder: Path) -> None:
    path = folder / "rank0.json"
    path.write_text(path.read_text().replace('"gloo"', '"gl\\u001b[31moo"').replace("aten::mm", "aten::m\\u001b[2Jm"))
    changed = text(trace([path], against=folder / "rank1.json"))
    assert "\x1b" not in text(trace([path]), verbose=True) + changed
    assert "aten::mm" in changed


def test_a_memory_snapshot_is_known_by_its_content_and_has_an_answer_of_its_own(folder: Path) -> None:
    allocator = snapshots.Allocator()
    allocator.allocate(1000, 5)
    path = snapshots.write(folder / "memory.json", allocator.snapshot())
    assert as_json(trace([path]))["snapshots"][0]["devices"][0]["allocated_bytes"] == 1024
    with pytest.raises(TraceError, match=r"memory\.json: is a memory snapshot, other files are not"):
        trace([folder / "rank0.json", path])
    with pytest.raises(SpecError, match="takes no option of traces"):
        trace([path], page=folder / "page.html")


def test_a_dry_runs_trace_is_held_against_the_real_one_whichever_comes_first(folder: Path) -> None:
    real, dry = folder / "rank0.json", rank_of_a_job(folder / "dry.json", 0, late=0, compute=45)
    dry.write_text(json.dumps(json.loads(dry.read_text()) | {WRITER: DRY_RUN}))
    answer, other = trace([real], against=dry), trace([dry], against=real)
    found = as_json(answer)
    assert (found["a_ns"], found["prediction"]) == (as_json(other)["a_ns"], as_json(other)["prediction"])
    errors = {one["name"]: one["predicted_ns"] - one["real_ns"] for one in found["prediction"]}
    assert errors == {"matrix products, bf16": 15_000, "communication, exposed": -15_000, "idle, launch-bound": 0}
    assert text(answer).startswith(f"real (A): {real}, 1 step of 100 us\npredicted (B): {dry}")
    assert verdict(answer) == [
        "The dry run predicts a step of 100 us; the real one takes 100 us: exactly right.",
        "It is most wrong about communication, exposed -15.0 us (within, between), matrix products, bf16 +15.0 us "
        "(matmul.bf16.efficiency).",
        "Without the GPU's waits for the host, 80.0 us are predicted of 80.0 us (0.0 %). A profiler slows the host "
        "down: judge host_s by a step without one.",
        "Errors cancel: those of all parts are 30.0 % of the step.",
    ]
    assert verdict(trace([dry], against=dry)) == ["No difference."]
