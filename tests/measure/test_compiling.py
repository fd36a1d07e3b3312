"""Compiling anew: in a folder of its own that goes, whatever the environment says."""

import os
from pathlib import Path

import pytest

from refshard.measure.trainer import compiling_anew

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.parametrize("within", [None, "deep/down"])
def test_what_is_compiled_goes_and_the_environment_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if within is not None:
        monkeypatch.setenv(VARIABLE, str(tmp_path / within))
    before = os.environ.get(VARIABLE)
    folders = []
    for _ in range(2):
        with compiling_anew() as compile_s:
            folders.append(Path(os.environ[VARIABLE]))
            (folders[-1] / "kernel.so").touch()
            assert compile_s() >= 0
        assert os.environ.get(VARIABLE) == before
        assert not folders[-1].exists()
    assert folders[0] != folders[1]
    if within is not None:
        assert folders[0].parent == tmp_path / within
