"""``python -m refshard.fakecuda.compile FOLDER``: the build, in a separate process because it imports torch."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torchgen
from torch.utils import cpp_extension

from refshard.fakecuda.build import NAME, SOURCES

_OWN = frozenset((
    "record_stream", "_fused_sdp_choice", "copy_", "equal", "_local_scalar_dense", "resize_", "_foreach_copy_",
    "_grouped_mm",
))  # fmt: skip
"""Operators that have a kernel of their own in the extension."""
_ONE_LAUNCH = ("convolution",)
"""Composite operators that choose a backend by what the build supports; the fake device counts each as one launch."""


def operators_with_composite() -> list[str]:
    """Operators with both a CUDA kernel and a composite kernel, which torch would prefer to a fallback."""
    found = []
    for name, entry in _native_functions():
        dispatch = entry.partition("\n  dispatch:")[2]
        # A structured operator has its kernel for CUDA in the variant with an out argument.
        on_cuda = re.search(r"\bCUDA\b", dispatch) or "\n  structured_delegate:" in entry
        if on_cuda and "Composite" in dispatch and name.partition(".")[0] not in _OWN:
            found.append(name)
    return [*found, *_ONE_LAUNCH]


def _native_functions() -> Iterator[tuple[str, str]]:
    """The operators that torch declares, each with the text of its entry."""
    packaged = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    for entry in re.split(r"^- func: ", packaged.read_text(), flags=re.MULTILINE)[1:]:
        yield entry.partition("(")[0], re.sub(r"#.*", "", entry)


def main(folder: Path) -> None:
    """Build ``FOLDER/build/NAME.so``."""
    build = folder / "build"
    build.mkdir(parents=True, exist_ok=True)
    (build / "operators.inc").write_text("".join(f'"{name}",\n' for name in operators_with_composite()))
    cpp_extension.load(
        NAME,
        [str(SOURCES / "extension.cpp")],
        build_directory=str(build),
        extra_cflags=["-O1", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-fvisibility=hidden"],
        extra_include_paths=[str(SOURCES), str(build)],
        is_python_module=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
