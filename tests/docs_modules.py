"""The modules in docs/, which no package holds."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def load(name: str) -> ModuleType:
    """Import ``docs/<name>.py``."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
