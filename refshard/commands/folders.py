"""Folders of runs, as the command line names them."""

from collections import Counter
from datetime import datetime
from pathlib import Path

from refshard.errors import StoreError, nearest
from refshard.measure.store import holds_run, read_run
from refshard.records import Run
from refshard.report.blocks import Answer, Cell, Column, Marked, Notes, Table


def find_run(folder: Path) -> Path:
    """``folder``, if a run was begun in it.

    Raises:
        StoreError: not a run; the message names the runs in it, or the nearest folder.
    """
    if holds_run(folder):
        return folder
    if inside := runs_in(folder):
        names = ", ".join(str(path) for path in inside[-3:])
        more = f" (of {len(inside)})" if len(inside) > 3 else ""
        raise StoreError(f"{folder}: is not a run but contains runs; name one of them: {names}{more}")
    if folder.exists():
        raise StoreError(f"{folder}: there is no run in this folder; give the folder of a run, such as runs/latest")
    known = [path.name for path in _folders(folder.parent) if holds_run(path)]
    hint = nearest(folder.name, known) if known else "`refshard run` makes one"
    raise StoreError(f"{folder}: there is no such run; {hint}")


def runs_in(folder: Path) -> list[Path]:
    """The runs right below ``folder``, oldest first; links such as ``latest`` are left out."""
    found = [path for path in _folders(folder) if holds_run(path) and not path.is_symlink()]
    return sorted(found, key=lambda path: path.name)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def runs_answer(folder: Path) -> Answer:
    """A row for each run in ``folder``, the one that started last at the end."""
    runs: list[tuple[Path, Run]] = []
    rows: list[dict[str, object]] = []
    cells: list[list[Cell]] = []
    for path in runs_in(folder):
        try:
            runs.append((path, read_run(path)))
        except StoreError as error:
            rows.append({"run": str(path), "state": "damaged", "error": str(error)})
            cells.append([str(path), Marked("damaged", "bad"), "-", "-", "-"])
    runs.sort(key=lambda found: found[1].header.started_at)
    rows += [_row(path, run) for path, run in runs]
    cells += [_cells(path, run) for path, run in runs]
    columns = [
        Column("run", "left"), Column("state", "left"), Column("launches"), Column("suite", "left"),
        Column("started (UTC)", "left"),
    ]  # fmt: skip
    hint = [f"`refshard show {path}` shows the latest." for path, _ in runs[-1:]]
    return Answer(
        data={"runs": rows}, rows=rows, columns=("run", "state", "launches", "planned", "suite", "started_at", "error"),
        blocks=[Table(columns=columns, rows=cells), Notes(sentences=hint)],
    )  # fmt: skip


def state_of(run: Run) -> str:
    """How a run stands: ok, what became of its other launches, interrupted, or not closed (running, or killed)."""
    if run.end is None:
        return "not finished"
    if run.end.interrupted:
        return "interrupted"
    bad = Counter(launch.state for launch in run.launches if launch.state not in ("ok", "unsupported", "skipped"))
    return ", ".join(f"{count} {state}" for state, count in bad.items()) or "ok"


def _row(path: Path, run: Run) -> dict[str, object]:
    return {
        "run": str(path), "state": state_of(run), "launches": len(run.launches), "planned": run.header.planned or None,
        "suite": run.header.suite.name, "started_at": run.header.started_at, "error": None,
    }  # fmt: skip


def _cells(path: Path, run: Run) -> list[Cell]:
    state = state_of(run)
    planned = f" of {run.header.planned}" if run.header.planned else ""
    started = datetime.fromisoformat(run.header.started_at).strftime("%Y-%m-%d %H:%M")
    style = "plain" if state == "ok" else "doubtful" if state in ("interrupted", "not finished") else "bad"
    return [str(path), Marked(state, style), f"{len(run.launches)}{planned}", run.header.suite.name, started]  # type: ignore[arg-type]
