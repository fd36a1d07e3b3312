"""Put the fake CUDA device into the wheel, built for the torch and the Python that build it, if asked to.

``HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel --no-deps --no-build-isolation .`` asks.
"""

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Device(BuildHookInterface):
    """Builds the extension, or takes it from the cache."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the file and its place in the wheel, which then is one for this platform."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from refshard.fakecuda.build import build_name, extension

        path = extension()
        build_data["force_include"][str(path)] = f"refshard/fakecuda/built/{build_name()}/{path.name}"
        build_data["pure_python"], build_data["infer_tag"] = False, True
