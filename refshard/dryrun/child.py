"""``python -m refshard.dryrun.child FOLDER``: the process that a script runs in.

It activates the fake device before torch is imported and runs the script as Python would. It writes ``recording.npz``
and ``answer.json`` to the folder, however the script ends.
"""

import os
import resource
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import msgspec

from refshard.dryrun.launchers import Launchers, is_program, run_python
from refshard.dryrun.request import UNLIMITED_BYTES, Answer, Choice, Outcome, Request, read_routing
from refshard.errors import RefshardError
from refshard.fakecuda import activate
from refshard.specs.cluster import load_cluster

if TYPE_CHECKING:
    from refshard.dryrun.observe import Observer, Peaks

_FROM_OTHERS = frozenset({"_tensor_to_object", "broadcast_object_list", "recv_object_list", "scatter_object_list"})
"""Functions of torch.distributed that unpickle what another rank sent."""

REQUEST, ANSWER, RECORDING = "request.json", "answer.json", "recording.npz"


def main(folder: Path) -> int:
    """Run the request in ``folder`` and return the process's exit status: 0 if an answer was written."""
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    began = time.monotonic()
    os.environ.update(request.environment)
    hardware = load_cluster(request.cluster).accelerator
    if not request.limited:
        hardware = msgspec.structs.replace(hardware, memory_bytes=UNLIMITED_BYTES)
    try:
        ext = activate(hardware, devices=request.local_ranks, unusable_bytes=request.unusable_bytes)
    except RefshardError as refusal:
        print(f"refshard: {refusal}", file=sys.stderr)
        return 2
    ext.set_routing(*read_routing(request.routing), *request.expert_rank)
    ext.record(True)

    import torch.fx.experimental._config as symbolic

    from refshard.dryrun.observe import Observer, Peaks

    symbolic.meta_nonzero_assume_all_nonzero = True
    observer, peaks = Observer(ext, request.steps), Peaks(request.rank % request.local_ranks)
    observer.install()
    peaks.install()
    launched = not request.module and is_program(request.command[0])
    rank = _rank_environment(request)
    if not launched:  # a launcher's process becomes the rank when the launcher would start it
        os.environ.update(rank)
    ext.count_host_work()
    with Launchers(rank).following(program=launched):
        outcome, error, where = _run(request)
    ext.record(False)
    wall_s = time.monotonic() - began
    _leave(folder, request, ext, observer, peaks, outcome=outcome, error=error, where=where, wall_s=wall_s)
    return 0


def _rank_environment(request: Request) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank."""
    nodes = request.world_size // request.local_ranks
    return {
        "RANK": str(request.rank),
        "LOCAL_RANK": str(request.rank % request.local_ranks),
        "GROUP_RANK": str(request.rank // request.local_ranks),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_WORLD_SIZE": str(request.local_ranks),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(request.rank),
        "ROLE_WORLD_SIZE": str(request.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _run(request: Request) -> tuple[Outcome, str, str]:
    """Run the script. Returns its outcome, what it raised, and where."""
    import torch

    from refshard.dryrun.observe import StepsDone

    try:
        run_python(request.command, module=request.module)
    except StepsDone:
        return "stepped", "", ""
    except SystemExit as ended:
        if ended.code in (0, None):
            return "ended", "", ""
        return "failed", f"the script ended with {_status(ended.code)}", ""
    except torch.OutOfMemoryError as error:
        return "oom", _first_line(error), _site(error)
    except BaseException as error:
        if isinstance(error.__cause__ or error.__context__, StepsDone):
            return "stepped", "", ""
        traceback.print_exception(type(error), error, _of_script(error))
        return "failed", _cause(error), _site(error)
    return "ended", "", ""


def _status(code: object) -> str:
    """What Python makes of ``sys.exit``'s argument."""
    return f"exit status {code}" if isinstance(code, int) else f"exit status 1: {code}"


def _of_script(error: BaseException) -> TracebackType | None:
    """The traceback from the script's own first line on, or the whole of it if it never got there."""
    from refshard.fakecuda.torch_c import is_internal

    rest = error.__traceback__
    while rest is not None and is_internal(rest.tb_frame.f_code.co_filename):
        rest = rest.tb_next
    return rest if rest is not None or isinstance(error, SyntaxError) else error.__traceback__


def _cause(error: BaseException) -> str:
    name = type(error).__name__
    if name in ("TritonMissing", "InductorError"):  # InductorError: Triton is installed, but finds no GPU
        return (
            f"{name}: torch.compile's inductor generates Triton kernels, which need a real GPU, so a dry run "
            "does not support compiled code; remove torch.compile, or use backend='aot_eager', which launches the same "
            "operators unfused"
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        return (
            f"{name}: the script imports triton, which torch's CPU build does not install; run pip install triton if "
            "it is only imported, as a dry run cannot launch Triton kernels"
        )
    if any(frame.name in _FROM_OTHERS for frame in traceback.extract_tb(error.__traceback__)):
        return (
            f"{name}: the script unpickles an object that another rank would have sent, but a dry run runs one rank "
            "only; run the rank that sends it (--rank, usually 0)"
        )
    return f"{name}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _site(error: BaseException) -> str:
    """The innermost line of the traceback that is neither torch's nor this project's."""
    from refshard.fakecuda.torch_c import is_internal, short

    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_internal(f.filename)]
    return f"{short(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _leave(
    folder: Path, request: Request, ext: ModuleType, observer: "Observer", peaks: "Peaks", *, outcome: Outcome,
    error: str, where: str, wall_s: float,
) -> None:  # fmt: skip
    import torch

    from refshard.dryrun.observe import pool
    from refshard.dryrun.recording import Kind, collect, save
    from refshard.dryrun.settle_answer import settle_answer

    device = request.rank % request.local_ranks
    recording = collect(ext, request.rank, request.world_size)
    allocations = int((recording.kinds == Kind.ALLOCATE).sum()) if outcome == "oom" else 0
    choices, chosen_sizes, *expert_rank = ext.assumed()
    answer = Answer(
        outcome=outcome, error=error, where=where, steps_taken=observer.steps_taken, tokens=sum(observer.tokens),
        parameters=observer.parameters, sharing=observer.sharing, world_size=request.world_size,
        allocations=allocations, peak=peaks.highest(),
        now=pool(device, "current"), retries=torch.cuda.memory_stats(device)["num_alloc_retries"],
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, wall_s=wall_s,
        torch=str(torch.__version__), choices=tuple(Choice(**dict(zip(Choice.__struct_fields__, c))) for c in choices),
        chosen_sizes=chosen_sizes, expert_rank=tuple(expert_rank),
    )  # fmt: skip
    answer, recording = settle_answer(answer, recording, request, ext)
    save(recording, folder / RECORDING)
    (folder / ANSWER).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skip the script's threads and the destructors of tensors that outlive the device
