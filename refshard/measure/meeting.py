"""Where ranks meet whose launcher holds no store for them: at one of rank 0, on a port that the kernel chose.

Rank 0 leaves the address in the job's folder, which all ranks share, so no port is agreed on before and none can be
taken.
"""

import os
import socket
import time
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from refshard.errors import LaunchError

ADDRESS_FILE = "meeting"
STORE_IS_HELD = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""Variables of ranks whose store is held already, so that rank 0 opens none there; torch then reads the count too."""
_PATIENCE_S = 300.0
_POLL_S = 0.1

_held: list[TCPStore] = []
"""Rank 0's store, which lasts as long as its process."""


def meet(folder: Path, patience_s: float = _PATIENCE_S) -> None:
    """Set the variables by which ``init_process_group`` finds the store.

    Raises:
        LaunchError: rank 0 left no address in time.
    """
    path = folder / ADDRESS_FILE
    if os.environ["RANK"] == "0":
        # Where one host has all ranks, none needs to find it by its name.
        alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        host = "127.0.0.1" if alone else socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        _held.append(store)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(f"{host} {store.port}")
        unfinished.replace(path)
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank 0 left no address in {path} within {patience_s:g} s; all nodes must share the folder"
            )
        time.sleep(_POLL_S)
    address, port = path.read_text().split()
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": port, **STORE_IS_HELD})
