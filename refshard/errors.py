"""What refshard raises for a caller to catch, and the exit statuses of its commands.

Every message states the rule that was broken, the value that broke it, and the remedy. The command line prints
such an error as one line and exits with its status; a traceback means a defect in refshard itself.
"""

from enum import IntEnum


class Status(IntEnum):
    """Exit status of every command."""

    YES = 0
    NO = 1
    WRONG_CALL = 2
    NO_VERDICT = 3
    INTERRUPTED = 130


STATUSES = {
    Status.YES: "yes: it fits, every case ended ok, nothing got worse, nothing is wrong",
    Status.NO: "no: it does not fit, a case failed, something got worse, something is wrong",
    Status.WRONG_CALL: "wrong call: an option, a name or a file is wrong; nothing ran",
    Status.NO_VERDICT: "no verdict: too noisy, no baseline, or what had to run could not",
    Status.INTERRUPTED: "interrupted: Ctrl-C or a signal; the last line says what is saved",
}
"""What each status means."""


class RefshardError(Exception):
    """Root of everything that refshard raises on purpose."""

    status = Status.NO_VERDICT


class SpecError(RefshardError, ValueError):
    """A suite, case, preset or argument breaks a rule of its schema."""

    status = Status.WRONG_CALL


class EngineError(RefshardError):
    """The sharding engine met a model or an order of execution that it cannot serve correctly."""


class LaunchError(RefshardError):
    """The network, Slurm or torchrun that should start ranks is missing, or failed."""


class CheckpointError(RefshardError):
    """A checkpoint or an exported model is missing, damaged or of another model, or could not be written."""

    status = Status.WRONG_CALL


class UnsupportedError(RefshardError):
    """A strategy cannot do what a case asks for; the case ends in the state ``unsupported`` with this reason."""

    status = Status.WRONG_CALL


class TraceError(RefshardError):
    """A trace file is damaged or not a trace, or the package that reads it is missing."""

    status = Status.WRONG_CALL


class StoreError(RefshardError):
    """A run folder is missing, torn, or written by a newer refshard."""

    status = Status.WRONG_CALL


def first_line(error: BaseException) -> str:
    r"""The first line of an error's message, with the next one where it only announces that.

    >>> first_line(RuntimeError("backend='inductor' raised:\nKeyError: 'x'\n\nSet TORCHDYNAMO_VERBOSE=1"))
    "backend='inductor' raised: KeyError: 'x'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def nearest(name: str, known: list[str]) -> str:
    """Return the remedy for an unknown name: the closest known one, or all of them.

    >>> nearest("yafsdpp", ["fsdp", "yafsdp"])
    "did you mean 'yafsdp'?"
    """
    import difflib

    spellings = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), spellings, n=1)
    return f"did you mean '{spellings[close[0]]}'?" if close else "known: " + ", ".join(sorted(known))
