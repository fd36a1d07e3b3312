"""What torch's CPU build lacks of ``torch.distributed``: NCCL's process group, and in a dry run peers to meet."""

import datetime
import importlib
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

_TIMEOUT = datetime.timedelta(minutes=10)
"""NCCL's, unless the script gives another."""
_ALONE = {"rank": 0, "world_size": 1}


class _Options:
    """What ``ProcessGroupNCCL.Options`` holds."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self._timeout = _TIMEOUT
        self.split_from: Any = None
        self.split_color = -1
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.group_desc = ""


def install(ext: ModuleType) -> None:
    """Put NCCL where torch looks for it, and in a dry run something in gloo's place."""
    import torch._C._distributed_c10d as c10d

    def make_gloo(store: Any, rank: int, size: int, options: Any) -> Any:
        if ext.is_dry() or size == 1:
            return None
        gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("bytes", store), rank, size, timeout=options._timeout)
        gloo._set_sequence_number_for_group()
        return gloo

    real_gloo = c10d.ProcessGroupGloo
    ext.make_process_group_classes(make_gloo)
    ext.ProcessGroupNCCL.Options = _Options
    # torch splits NCCL's communicator where a device is bound to it, and else makes the same groups one by one.
    c10d.ProcessGroup.bound_device_id = property(lambda *_: None, lambda *_: None)  # type: ignore[assignment]
    c10d._DEFAULT_PG_NCCL_TIMEOUT = _TIMEOUT
    c10d.ProcessGroupNCCL = ext.ProcessGroupNCCL  # type: ignore[misc]
    if not ext.is_dry():
        return
    ext.ProcessGroupGloo.create_device = staticmethod(real_gloo.create_device)
    c10d.ProcessGroupGloo = ext.ProcessGroupGloo  # type: ignore[misc]


def meet_nobody(ext: ModuleType) -> None:
    """In a dry run a rank runs alone and waits for no other: stores are its own."""
    if not ext.is_dry():
        return
    from torch._C._distributed_c10d import HashStore

    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    store = HashStore()

    def alone(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        asked = {
            name: value for name, value in parse_qsl(urlsplit(url).query) if value != "-1"
        }  # where torch puts what init_process_group is given
        rank, size = (int(asked.get(name, os.environ.get(name.upper(), rest))) for name, rest in _ALONE.items())
        yield store, rank, size

    for scheme in ("env", "tcp", "file"):
        rendezvous._rendezvous_handlers[scheme] = alone
