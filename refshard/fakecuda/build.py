"""Build the extension with the user's compiler, once per build of torch, Python's ABI and version of the sources.

All environments of a user with the same torch share it. torch is not imported here, because the extension must be
loaded before torch. The build needs torch's own build tools, so it runs in another process.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

from refshard.errors import RefshardError

NAME = "refshard_fakecuda"
SOURCES = Path(__file__).parent / "csrc"
IN_WHEEL = Path(__file__).parent / "built"
"""Where a wheel has the extension, if it was built with it."""
TRIED = (2, 13)
"""The newest torch on which dry runs were tried."""
_FILE = f"{NAME}.so"
_ENVIRONMENT = (
    "create an environment with the CPU build, from a checkout of refshard: python3 -m venv .dryrun && "
    ".dryrun/bin/pip install -c constraints.txt -e . --extra-index-url https://download.pytorch.org/whl/cpu"
)


def extension() -> Path:
    """The path of the extension, a shared library: the wheel's or an earlier build's. Builds it if there is none, with
    a message on standard error.

    Raises:
        RefshardError: torch is missing or is a CUDA build, there is no C++ compiler, or the build failed.
    """
    name = build_name()
    if (found := _built(name)) is not None:
        return found
    _check_tools()
    folder = _cache() / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # ranks start together
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("refshard: waiting for another process to build the fake CUDA device", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _FILE).exists():
            _build(folder)
    return folder / _FILE


def check() -> None:
    """Build nothing, and tell whether :func:`extension` could.

    Raises:
        RefshardError: torch is missing or is a CUDA build, or there is no C++ compiler and it is not built yet.
    """
    if _built(build_name()) is None:
        _check_tools()


def torch_library() -> Path:
    """A library of the installed torch that brings all others. It must be loaded before the extension, which does not
    say where torch is, so that environments can share it.
    """
    return _torch()[0] / "lib" / "libtorch_python.so"


def build_name() -> str:
    """Names what the extension depends on: the sources, Python's ABI, and torch's build, which fixes the compiler's."""
    folder, version = _torch()
    digest = hashlib.sha256((folder / "version.py").read_bytes())
    for path in sorted([*SOURCES.iterdir(), Path(__file__).with_name("compile.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch-{version}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


def _built(name: str) -> Path | None:
    """The extension of this name, where a wheel or a build left it."""
    places = (IN_WHEEL / name / _FILE, _cache() / name / _FILE)
    return next((place for place in places if place.exists()), None)


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


def _check_tools() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise RefshardError(
            "building the fake CUDA device needs a C++ compiler, and none was found; install g++ (Debian, Ubuntu: "
            "apt-get install g++), or set CXX to your compiler"
        )
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        raise RefshardError("building the fake CUDA device needs ninja, which is not installed; run pip install ninja")


def _build(folder: Path) -> None:
    version = _torch()[1]
    if (read := re.match(r"(\d+)\.(\d+)", version)) and (int(read[1]), int(read[2])) > TRIED:
        tried = ".".join(map(str, TRIED))
        print(f"refshard: dry runs were tried on torch up to {tried}, not on {version}", file=sys.stderr)
    says = "refshard: building the fake CUDA device, once per torch version, about 30 s"
    print(says, file=sys.stderr, end="" if sys.stderr.isatty() else "\n", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "refshard.fakecuda.compile", str(folder)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    log = folder / "build.log"
    with log.open("w") as output:
        done = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while _runs(done):
            if sys.stderr.isatty():
                print(f"\r{says}: {time.monotonic() - began:.0f} s", file=sys.stderr, end="", flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if done.returncode:
        errors = [line for line in log.read_text().splitlines() if re.search(r"error:|undefined symbol|Error: ", line)]
        raise RefshardError(
            f"the fake CUDA device could not be built; first error: {errors[0] if errors else 'none found'}; full "
            f"log: {log}"
        )
    (folder / "build" / _FILE).replace(folder / _FILE)
    print(f"refshard: built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a second, and tell whether it still runs."""
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return True
    return False


def main() -> None:
    """Print the path of the extension and its place in a wheel, for ``hatch_build.py``."""
    try:
        path = extension()
    except RefshardError as error:
        sys.exit(str(error))
    print(path, (IN_WHEEL / build_name() / _FILE).relative_to(SOURCES.parents[2]), sep="\n")


if __name__ == "__main__":
    main()
