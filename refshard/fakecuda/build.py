"""Build the extension with the user's compiler, once per installed torch, version of Python and of the sources.

torch is not imported here, because the extension must be loaded before torch. The build needs torch's own build tools,
so it runs in another process.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from refshard.errors import RefshardError

NAME = "refshard_fakecuda"
SOURCES = Path(__file__).parent / "csrc"
_ENVIRONMENT = (
    "create an environment with the CPU build, from a checkout of refshard: python3 -m venv .dryrun && "
    ".dryrun/bin/pip install -c constraints.txt -e . --extra-index-url https://download.pytorch.org/whl/cpu"
)


def extension() -> Path:
    """The path of the extension, a shared library. Builds it if necessary, with a message on standard error.

    Raises:
        RefshardError: torch is missing or is a CUDA build, there is no C++ compiler, or the build failed.
    """
    torch_folder, version = _torch()
    folder = _folder(torch_folder, version)
    built = folder / f"{NAME}.so"
    if built.exists():
        return built
    _check_tools()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together
        if not built.exists():
            _build(folder, built, torch_folder)
    return built


def check() -> None:
    """Build nothing, and tell whether :func:`extension` could.

    Raises:
        RefshardError: torch is missing or is a CUDA build, or there is no C++ compiler and it is not built yet.
    """
    if not (_folder(*_torch()) / f"{NAME}.so").exists():
        _check_tools()


def _folder(torch_folder: Path, version: str) -> Path:
    """Where the extension for the torch in ``torch_folder`` is built and kept.

    The extension finds torch's libraries where they were when it was built. If environments shared it, it would break
    in all of them once the one that built it is deleted.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    where = hashlib.sha256(str(torch_folder).encode()).hexdigest()[:8]
    return _cache() / f"torch-{version}-{python}-{where}-{_sources_hash()}"


def _torch() -> tuple[Path, str]:
    """The folder of the installed torch, and its version."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RefshardError(f"the fake CUDA device needs torch, which is not installed; {_ENVIRONMENT}")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text)
    if re.search(r"^cuda[^=\n]*= '", text, re.MULTILINE):
        raise RefshardError(
            "the fake CUDA device needs torch's CPU build, but the torch installed here is a CUDA "
            f"build ({version[1] if version else 'unknown version'}); {_ENVIRONMENT}"
        )
    return folder, version[1] if version else "unknown"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "refshard" / "fakecuda"


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.iterdir(), Path(__file__).with_name("compile.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _check_tools() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise RefshardError(
            "building the fake CUDA device needs a C++ compiler, and none was found; install g++ (Debian, Ubuntu: "
            "apt-get install g++), or set CXX to your compiler"
        )
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        raise RefshardError("building the fake CUDA device needs ninja, which is not installed; run pip install ninja")


def _build(folder: Path, built: Path, torch_folder: Path) -> None:
    print("refshard: building the fake CUDA device (about 40 s, once per environment)", file=sys.stderr, flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "refshard.fakecuda.compile", str(folder), str(torch_folder)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        log = folder / "build.log"
        log.write_text(done.stdout + done.stderr)
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line for line in lines if re.search(r"error:|undefined symbol|Error: ", line)]
        raise RefshardError(
            f"the fake CUDA device could not be built; first error: {errors[0] if errors else 'none found'}; full "
            f"log: {log}"
        )
    (folder / "build" / f"{NAME}.so").replace(built)
    print(f"refshard: built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
