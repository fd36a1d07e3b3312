"""``python -m refshard.dryrun.child FOLDER``: the process that a script runs in.

It activates the fake device before torch is imported and runs the script as Python would. It writes ``recording.npz``
and ``answer.json`` to the folder, however the script ends. If the folder has values of other ranks, it uses them,
writes its own, and records which lines issue collectives.
"""

import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from refshard.dryrun.exchange import Exchange, read_values, write_values
from refshard.dryrun.failures import before_capture_failed, is_missing_module, message, of_script, place
from refshard.dryrun.launchers import Launchers, is_program, run_python
from refshard.dryrun.request import UNLIMITED_BYTES, Answer, Choice, Outcome, Request, read_routing
from refshard.errors import RefshardError, first_line
from refshard.fakecuda import activate
from refshard.fakecuda.bitsandbytes import managed_bytes
from refshard.fakecuda.inductor import keep_apart
from refshard.fakecuda.torch_c import places, visible_devices
from refshard.fakecuda.without_triton import Refused
from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.specs.cluster import load_cluster

if TYPE_CHECKING:
    from refshard.dryrun.observe import Observer, Peaks

REQUEST, ANSWER, RECORDING = "request.json", "answer.json", "recording.npz"
GIVEN, SENT = "given.msgpack", "sent.msgpack"
"""Values of other ranks, where several run, and what this one sent."""


def main(folder: Path) -> int:
    """Run the request in ``folder`` and return the process's exit status: 0 if an answer was written."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C needs no traceback: the parent says what it ended
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    os.environ.update(request.environment)
    if visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) == 0:
        print("refshard: CUDA_VISIBLE_DEVICES names no GPU and is ignored: a dry run's are fake", file=sys.stderr)
        del os.environ["CUDA_VISIBLE_DEVICES"]
    keep_apart(folder)
    hardware = load_cluster(request.cluster).accelerator
    if not request.limited:
        hardware = msgspec.structs.replace(hardware, memory_bytes=UNLIMITED_BYTES)
    try:
        ext = activate(
            hardware, devices=request.local_ranks, context_bytes=context(hardware).bytes,
            communicator_bytes=COMMUNICATOR_BYTES,
        )  # fmt: skip
    except RefshardError as refusal:
        print(f"refshard: {refusal}", file=sys.stderr)
        return 2
    began = time.monotonic()
    ext.set_routing(*read_routing(request.routing), *request.expert_rank)
    ext.record(True)
    if request.sites or request.watched:
        ext.record_sites_of_allocations()

    import torch.fx.experimental._config as symbolic

    from refshard.dryrun.observe import Observer, Peaks
    from refshard.dryrun.ranges import Ranges
    from refshard.dryrun.unknown_values import UnknownValues

    symbolic.meta_nonzero_assume_all_nonzero = True
    peaks = Peaks(request.rank % request.local_ranks)
    observer = Observer(ext, request.steps, peaks if request.until_stable else None)
    observer.install()
    peaks.install()
    ranges = Ranges(ext, request.watched, request.until)
    if request.watched:
        ranges.install()
    unknown = UnknownValues(ext, lambda: observer.steps_taken)
    unknown.install()
    exchange = None
    if (folder / GIVEN).exists():
        exchange = Exchange(ext, request.rank, request.world_size, read_values(folder / GIVEN))
        exchange.install()
        ext.set_places_callback(places)
    launched = not request.module and is_program(request.command[0])
    rank = _rank_environment(request)
    if request.rank_variables and not launched:  # a launcher's process becomes the rank when it would start it
        os.environ.update(rank)
    ext.count_host_work()
    with Launchers(rank).following(program=launched):
        outcome, raised = _run(request)
    ext.record(False)
    if exchange is not None:
        write_values({request.rank: tuple(exchange.sent)}, folder / SENT)
    told: dict[str, Any] = {"ranges": tuple(ranges.seen)}
    if raised is not None:
        error = first_line(raised) if outcome == "oom" else message(raised, request.command)
        told |= {"error": error, "where": place(raised), "blamed": unknown.blamed(raised)}
    _leave(folder, request, ext, observer, peaks, outcome=outcome, wall_s=time.monotonic() - began, told=told)
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


def _run(request: Request) -> tuple[Outcome, BaseException | None]:
    """Run the script. Returns its outcome, and what it raised unless all went well."""
    import torch

    from refshard.dryrun.observe import StepsDone

    try:
        run_python(request.command, module=request.module)
    except StepsDone:
        return "stepped", None
    except SystemExit as ended:
        return ("ended", None) if ended.code in (0, None) else ("failed", ended)
    except torch.OutOfMemoryError as error:
        return "oom", error
    except BaseException as error:
        if isinstance(error.__cause__ or error.__context__, StepsDone):
            return "stepped", None
        if not isinstance(error, Refused) and not is_missing_module(error):
            traceback.print_exception(type(error), error, of_script(error))
        return "failed", before_capture_failed(error)
    return "ended", None


def _leave(
    folder: Path, request: Request, ext: ModuleType, observer: "Observer", peaks: "Peaks", *, outcome: Outcome,
    wall_s: float, told: dict[str, Any],
) -> None:  # fmt: skip
    import torch

    from refshard.dryrun.compiled import compilation
    from refshard.dryrun.observe import pool
    from refshard.dryrun.recording import Kind, collect, save
    from refshard.dryrun.settle_answer import other_segments, settle_answer

    device = peaks.device()
    recording = collect(ext, request.rank, request.world_size)
    allocations = int((recording.kinds == Kind.ALLOCATE).sum()) if outcome == "oom" else 0
    choices, chosen_sizes, *expert_rank = ext.assumed()
    answer = Answer(
        outcome=outcome, **told, steps_taken=observer.steps_taken, tokens=sum(observer.tokens),
        batches=tuple(observer.batches),  # type: ignore[arg-type]
        parameters=observer.parameters, sharing=observer.sharing, world_size=request.world_size,
        allocations=allocations, peak=peaks.highest(),
        others={other: size for other, size in peaks.reserved().items() if size and other != device},
        now=pool(device, "current"), retries=torch.cuda.memory_stats(device)["num_alloc_retries"],
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        managed_bytes=managed_bytes(), wall_s=wall_s, torch=str(torch.__version__), compiled=compilation(),
        choices=tuple(Choice(**dict(zip(Choice.__struct_fields__, c))) for c in choices), chosen_sizes=chosen_sizes,
        expert_rank=tuple(expert_rank),
    )  # fmt: skip
    other = other_segments(answer, recording, request, ext, device)
    answer = msgspec.structs.replace(answer, other_segments=other)
    answer, recording = settle_answer(answer, recording, request, ext, device)
    save(recording, folder / RECORDING)
    (folder / ANSWER).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skip the script's threads and the destructors of tensors that outlive the device
