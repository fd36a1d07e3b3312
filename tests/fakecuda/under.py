"""``python -m tests.fakecuda.under MODE ARGUMENTS``: pytest in a process that has fake H100s."""

import sys
from typing import cast

from refshard.fakecuda import activate
from refshard.fakecuda.activate import DeviceMode
from refshard.specs.hardware import load_hardware


def main(mode: DeviceMode, arguments: list[str]) -> int:
    """Run pytest; returns its exit status."""
    activate(load_hardware("h100-sxm-80gb"), mode=mode)
    import pytest

    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(cast(DeviceMode, sys.argv[1]), sys.argv[2:]))
