"""Put the fake CUDA device into the wheel, built for the torch that is installed, if it can be built."""

import os
import subprocess
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Device(BuildHookInterface):
    """Builds the extension, or takes it from the cache."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the file and its place in the wheel, which then is for this platform, but for any Python: where another
        torch is installed, the device is built on first use.
        """
        if version == "editable":
            return
        # pip isolates a build from the installed packages, by PYTHONPATH; torch is one of them.
        environment = {**os.environ, "PYTHONPATH": self.root}
        command = [sys.executable, "-m", "refshard.fakecuda.build"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            self.app.display_warning(f"no fake CUDA device in this wheel, dry runs will build it: {why}")
            return
        path, place = done.stdout.splitlines()
        build_data["force_include"][path] = place
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().translate(str.maketrans('-.', '__'))}"
