"""What torch's CPU build lacks of ``torch.distributed``: NCCL's process group, and in a dry run peers to meet."""

import dataclasses
import datetime
import importlib
import os
from collections.abc import Iterator, Sequence
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
    ext.ProcessGroupNCCL._add_ephemeral_timeout = lambda *_: None  # inductor asks for it when its cache saved time
    # torch splits NCCL's communicator where a device is bound to it, and else makes the same groups one by one.
    c10d.ProcessGroup.bound_device_id = property(lambda *_: None, lambda *_: None)  # type: ignore[assignment]
    c10d._DEFAULT_PG_NCCL_TIMEOUT = _TIMEOUT
    c10d.ProcessGroupNCCL = ext.ProcessGroupNCCL  # type: ignore[misc]
    if not ext.is_dry():
        register = c10d.ProcessGroup._register_backend

        def register_for(group: Any, device: Any, kind: Any, backend: Any) -> None:
            """As torch does; but the CPU build's gloo ends the process where it meets a tensor of a GPU."""
            if device.type == "cuda" and isinstance(backend, real_gloo):
                kind, backend = c10d.ProcessGroup.BackendType.CUSTOM, ext.ProcessGroupGloo(backend)
            register(group, device, kind, backend)

        c10d.ProcessGroup._register_backend = register_for  # type: ignore[assignment]
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


def save_alone(ext: ModuleType) -> None:
    """In a dry run the other ranks' plans of a distributed checkpoint are copies of this rank's. It writes all that it
    has, as if the others had nothing of it, and torch's check that nothing is missing is skipped.
    """
    if not ext.is_dry():
        return
    planner: Any = importlib.import_module("torch.distributed.checkpoint.default_planner")

    def keep_own(plans: Sequence[Any], *_: Any) -> list[Any]:
        return [plans[0], *(dataclasses.replace(plan, items=[]) for plan in plans[1:])]

    planner.dedup_save_plans = keep_own
    planner._validate_global_plan = lambda *_: []


def infer_nothing(ext: ModuleType) -> None:
    """In a dry run a pipeline stage cannot ask its neighbours for shapes: its own must be given, and theirs are then
    taken to be given too.
    """
    if not ext.is_dry():
        return
    stages = importlib.import_module("torch.distributed.pipelining.stage")
    vote = stages.PipelineStage._warmup_backward_result

    def agreed(stage: Any, received_result: Any = None) -> Any:
        if stages.InferenceMode.needs_dynamic(stage._user_meta, stage_has_backward=True):
            raise NotImplementedError(
                "PipelineStage would ask other ranks for the shapes of its inputs and outputs, but a dry run runs one "
                "rank only; give it input_args and output_args (if they are DTensors, input_grads and output_grads too)"
            )
        return vote(stage, received_result).fill_(1)

    stages.PipelineStage._warmup_backward_result = agreed
