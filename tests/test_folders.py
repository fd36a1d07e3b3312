"""Replacing a folder: at whatever moment the writer dies, the old content or the new is found, and tidied up."""

from pathlib import Path

import pytest

from refshard import folders
from refshard.errors import CheckpointError


def write(folder: Path, content: str) -> None:
    (folders.begin(folder, ["*.txt"]) / "a.txt").write_text(content)


def read(folder: Path) -> str:
    return (folders.current(folder) / "a.txt").read_text()


def test_a_commit_replaces_all_and_leaves_nothing_beside(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "saved"
    for content in ("one", "two"):
        write(folder, content)
        folders.commit(folder)
        assert read(folder) == content
    assert [p.name for p in folder.parent.iterdir()] == ["saved"]


def test_before_the_commit_the_old_content_stands(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write(folder, "old")
    folders.commit(folder)
    write(folder, "new")
    (folders.partial(folder) / "torn.txt").write_text("half")
    assert read(folder) == "old"
    write(folder, "newer")
    assert [p.name for p in folders.partial(folder).iterdir()] == ["a.txt"], "what the killed writer left is gone"
    folders.abandon(folder)
    assert read(folder) == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_between_the_two_renames_the_old_content_is_found_and_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write(folder, "old")
    folders.commit(folder)
    write(folder, "new")
    folder.rename(tmp_path / ".saved.previous")  # what commit does first; here it dies
    assert read(folder) == "old"
    write(folder, "newer")
    assert (folder / "a.txt").read_text() == "old"
    folders.commit(folder)
    assert read(folder) == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_kill_while_the_old_content_is_deleted_leaves_the_new(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write(folder, "new")
    folders.commit(folder)
    (tmp_path / ".saved.previous").mkdir()
    assert read(folder) == "new"
    write(folder, "newer")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".saved.partial", "saved"]


def test_what_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds 'thesis\.tex', which replacing the folder would delete"):
        folders.begin(tmp_path, ["*.txt"])
    with pytest.raises(CheckpointError, match="must be a folder, but it is a file"):
        folders.begin(tmp_path / "thesis.tex", ["*.txt"])
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "new")
    folders.commit(tmp_path / "link")
    assert (tmp_path / "real" / "a.txt").read_text() == read(tmp_path / "link") == "new"
    assert (tmp_path / "link").is_symlink()


def test_a_link_stays_a_link_and_a_device_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    folders.replace_file(tmp_path / "link", ["new"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    for path in (Path("/dev/null"), tmp_path / "file"):
        folders.check_replaceable_file(path)
    folders.replace_file(Path("/dev/null"), ["gone"])
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("place", ["", "none/file", "/proc/file"])
def test_what_cannot_be_replaced_is_known_before(tmp_path: Path, place: str) -> None:
    with pytest.raises(OSError, match="directory"):
        folders.check_replaceable_file(tmp_path / place)
