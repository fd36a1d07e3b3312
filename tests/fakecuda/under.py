"""``python -m tests.fakecuda.under MODE ARGUMENTS``: pytest in a process that has fake H100s."""

import importlib
import sys


def main(mode: str, arguments: list[str]) -> int:
    """Run pytest; returns its exit status."""
    importlib.import_module(f"tests.fakecuda.devices.{mode}")
    import pytest

    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
