"""``refshard.dry_run``: train the model that a function builds on fake GPUs, and return memory and step time.

The function runs in another process, where the fake device is loaded before torch. It is found there by its module and
name. A function from a notebook is sent as source, so it must contain its own imports.
"""

import importlib
import inspect
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from refshard.dryrun.analyse import analyse
from refshard.dryrun.request import request_on
from refshard.dryrun.run import dry_run as run_script
from refshard.dryrun.trials import Prediction, Trial, summary
from refshard.errors import SpecError

if TYPE_CHECKING:
    import torch

_SPEC = "spec.json"
_MAIN = "_refshard_main"


class _Function(msgspec.Struct, frozen=True):
    """Where a function is: in a ``module``, in a ``file`` that was run as a program, or only as ``source``."""

    name: str
    module: str = ""
    file: str = ""
    source: str = ""


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor of a batch; integers are all ``most``."""

    shape: tuple[int, ...]
    dtype: str
    most: int = 0


class _Spec(msgspec.Struct, frozen=True):
    build: _Function
    batch: dict[str, _Tensor]
    by_name: bool
    loss: _Function | None
    steps: int
    path: tuple[str, ...]


def dry_run(
    build: Callable[[], Any], batch: "torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]", *,
    cluster: str, gpus: int | None = None, loss: "Callable[[Any, Any], torch.Tensor] | None" = None, steps: int = 3,
    rank: int = 0,
) -> Prediction:  # fmt: skip
    """Train the model that ``build`` makes on fake GPUs of ``cluster``, in another process; nothing is computed.

    Args:
        build: returns the model on the GPU, or ``(model, optimizer)``; the default optimizer is fused AdamW. With
            several GPUs, it shards the model itself: torch.distributed is initialised, and torchrun's variables are
            set.
        batch: arguments of the model in each step: a tensor, a sequence of tensors, or a mapping for keyword
            arguments. Only shapes, dtypes and the largest value of integers matter.
        cluster: GPUs or a cluster profile, as in ``refshard dryrun --cluster``: ``"8xh100"``.
        gpus: number of GPUs; by default all of the cluster.
        loss: ``loss(output, batch)``; by default the output's ``loss``, else the mean of the output.
        steps: number of optimizer steps.
        rank: the rank to run.

    Returns:
        ``fits`` (None without a verdict) and ``why`` not; ``reserved_bytes``, ``allocated_bytes`` at the peak and
        ``usable_bytes``; ``step_s`` in seconds, ``tokens_per_s`` per GPU, ``mfu`` as a fraction.

    Raises:
        SpecError: another process cannot find the function, or another value is wrong.
        RefshardError: the fake device cannot be made, or the process ended without an answer.
    """
    single = hasattr(batch, "is_floating_point")
    named: dict[Any, Any] = dict(batch if isinstance(batch, Mapping) else enumerate([batch] if single else batch))
    spec = _Spec(
        build=_locate(build, "build"), batch={str(name): _described(tensor) for name, tensor in named.items()},
        by_name=isinstance(batch, Mapping), loss=None if loss is None else _locate(loss, "loss"), steps=steps,
        path=tuple(sys.path),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="refshard-factory-") as folder:
        path = Path(folder) / _SPEC
        path.write_bytes(msgspec.json.encode(spec))
        request = request_on(cluster, gpus, command=(__name__, str(path)), module=True, rank=rank, steps=steps)
        return summary(analyse(run_script(request), Trial(request=request).cluster))


def _locate(function: Callable[..., Any], argument: str) -> _Function:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not name or "<" in name:
        raise SpecError(
            f"dry_run: {argument} must be a function that another process can import, got {name or function!r}; "
            "define it with def, at the top level of a module"
        )
    if module != "__main__":
        return _Function(name=name, module=str(module))
    if file := getattr(sys.modules["__main__"], "__file__", None):
        return _Function(name=name, file=str(Path(file).resolve()))
    return _Function(name=name, source=inspect.getsource(function))


def _find(place: _Function) -> Callable[..., Any]:
    if place.source:
        names: dict[str, Any] = {}
        exec(place.source, names)
        return names[place.name]  # type: ignore[no-any-return]
    if place.file:
        return runpy.run_path(place.file, run_name=_MAIN)[place.name]  # type: ignore[no-any-return]
    found: Any = importlib.import_module(place.module)
    for part in place.name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _described(tensor: "torch.Tensor") -> _Tensor:
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    most = int(tensor.max()) if integers and tensor.device.type == "cpu" and tensor.numel() else 1
    return _Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), most)


def main(path: Path) -> None:
    """Train, in the process with the fake device."""
    import os

    import torch
    import torch.distributed as dist

    spec = msgspec.json.decode(path.read_bytes(), type=_Spec)
    sys.path[:] = [*spec.path, *(one for one in sys.path if one not in spec.path)]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl")
    built = _find(spec.build)()
    model, optimizer = built if isinstance(built, tuple) else (built, None)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of = _mean if spec.loss is None else _find(spec.loss)
    for _ in range(spec.steps):
        batch = {name: _made(one) for name, one in spec.batch.items()}
        output = model(**batch) if spec.by_name else model(*batch.values())
        values = list(batch.values())
        loss_of(output, batch if spec.by_name else values[0] if len(values) == 1 else values).backward()
        optimizer.step()
        optimizer.zero_grad()


def _made(one: _Tensor) -> "torch.Tensor":
    import torch

    dtype = getattr(torch, one.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.zeros(one.shape, dtype=dtype, device="cuda")
    return torch.full(one.shape, one.most, dtype=dtype, device="cuda")


def _mean(output: Any, _: Any) -> "torch.Tensor":
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:
        found = output[0] if isinstance(output, tuple) else output
    return found.float().mean()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
