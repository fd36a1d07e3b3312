"""Run one rank of a script on the fake device, in a separate process, and return what it requested of the device."""

import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from refshard.dryrun.child import ANSWER, GIVEN, RECORDING, REQUEST, SENT
from refshard.dryrun.environments import this_refshard
from refshard.dryrun.exchange import Sent, Values, read_values, write_values
from refshard.dryrun.recording import Recording, load
from refshard.dryrun.request import WORST, Answer, Request
from refshard.errors import RefshardError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DryRun:
    """The request, the outcome, and the recording of what the script requested of the device.

    ``refused`` is the outcome within the GPU's memory, if the script ran out of it. The other fields then describe a
    second run, with unlimited memory. If sizes depend on choices that an assumption made, ``by_routing`` has the answer
    under the request's assumption and at worst, the latter with unlimited memory. Where several ranks run, ``sent`` are
    the values that this one gave to collectives, and ``output`` is what the script printed.
    """

    request: Request
    answer: Answer
    recording: Recording
    refused: Answer | None = None
    by_routing: dict[str, Answer] = field(default_factory=dict)
    sent: tuple[Sent, ...] = ()
    output: str = ""


def dry_run(request: Request, *, also_at_worst: bool = True, quiet: bool = False) -> DryRun:
    """Run the script that the request names. Its output goes to this process's standard error; nowhere if ``quiet``.

    If sizes depend on an assumed routing, the script runs again at worst, unless ``also_at_worst`` is false. Where its
    experts lie is known from the first run, so that one is balanced if the request is for the worst.

    Raises:
        RefshardError: the device could not be created, or the script's process ended without an answer.
    """
    at_worst = request.routing == WORST
    run = _dry_run(msgspec.structs.replace(request, routing="balanced") if at_worst else request, quiet=quiet)
    answer = run.answer
    if not answer.chosen_sizes or answer.outcome == "failed":
        return replace(run, request=request)
    worst = msgspec.structs.replace(request, routing=WORST, expert_rank=answer.expert_rank)
    if at_worst:
        found = _dry_run(worst, quiet=quiet)
        return replace(found, by_routing={"balanced": answer, WORST: found.answer})
    if not also_at_worst:
        return run
    other = _run(msgspec.structs.replace(worst, limited=False), quiet=quiet)
    return replace(run, by_routing={request.routing: answer, WORST: other.answer})


def dry_run_among(request: Request, values: Values, *, quiet: bool) -> DryRun:
    """Run one rank of several, given the ``values`` that others sent. It prints nothing if ``quiet``.

    Raises:
        RefshardError: as :func:`dry_run`.
    """
    return _dry_run(request, values, quiet=quiet)


def _dry_run(request: Request, values: Values | None = None, *, quiet: bool = False) -> DryRun:
    """Run it under one assumption.

    A script that runs out of memory runs a second time, without a memory limit, to find out how much it needs. If it
    ran out only because ``record_stream()`` held memory back for too long, that shows there, and it counts as fitting.
    """
    run = _run(request, values, quiet=quiet)
    if run.answer.outcome != "oom":
        return _within_memory(run, run.answer)
    unlimited = _run(msgspec.structs.replace(request, limited=False), values, quiet=quiet)
    if unlimited.answer.outcome not in ("stepped", "ended"):
        return run
    return _within_memory(replace(unlimited, request=request), run.answer)


def _within_memory(run: DryRun, answer: Answer) -> DryRun:
    """The run, refused if it ran out of the GPU's memory: by ``answer``, unless memory held back tells otherwise."""
    within = run.answer.limited or answer
    if within.outcome == answer.outcome == "oom" and within.allocations == answer.allocations:
        within = msgspec.structs.replace(within, where=answer.where)  # the same allocation, and the script's own line
    return replace(run, refused=within if within.outcome == "oom" else None)


def _run(request: Request, values: Values | None = None, *, quiet: bool = False) -> DryRun:
    with tempfile.TemporaryDirectory(prefix="refshard-dryrun-") as name:
        folder = Path(name)
        (folder / REQUEST).write_bytes(msgspec.json.encode(request))
        if values is not None:
            write_values(values, folder / GIVEN)
        other = this_refshard() if request.python else nullcontext()
        with (folder / "output").open("w+") as output, other as variables:
            to = {"stdout": output, "stderr": output} if quiet else {"stdout": sys.stderr}
            command = [request.python or sys.executable, "-m", "refshard.dryrun.child", name]
            done = subprocess.run(command, env=variables, **to)
        printed = (folder / "output").read_text(errors="replace")
        if not (folder / ANSWER).exists():
            print(printed, file=sys.stderr, end="")
            raise RefshardError(_cause(done.returncode))
        answer = msgspec.json.decode((folder / ANSWER).read_bytes(), type=Answer)
        sent = () if values is None else read_values(folder / SENT)[request.rank]
        return DryRun(request=request, answer=answer, recording=load(folder / RECORDING), sent=sent, output=printed)


def _cause(status: int) -> str:
    if status == 2:
        return "dryrun: the fake device could not be created; see the error above"
    if status == -signal.SIGKILL:
        return (
            "dryrun: the script's process was killed (signal 9), as when this machine runs out of memory, and left no "
            "recording. Tensors on the CPU are real in a dry run: make the model on the GPU or under "
            "torch.device('meta'), or use a machine with more memory"
        )
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return f"dryrun: the script's process {how} and left no recording; run the script without refshard to see why"
