"""Ranks on several hosts that this machine makes of itself (Linux, root, iproute2's ``ip`` and ``tc``).

Each host is a network namespace with only one way out, ``eth0``, one end of a veth pair; the other ends are ports of a
bridge in one more namespace, the switch. A token bucket (tbf) limits what a host sends to the network's rate, and so
what its peers receive. Nothing is made in the machine's own namespace, and networks cannot reach each other: all may
use the same addresses, and none can clash with those of the machine.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from refshard.errors import LaunchError
from refshard.measure.environment import capture_environment
from refshard.measure.interruption import Interruption
from refshard.measure.launchers.base import (
    Launcher,
    Program,
    Ranks,
    check_fits_machine,
    rank_environment,
    started,
    worker_arguments,
)
from refshard.records import Environment
from refshard.specs.case import Case
from refshard.specs.suite import NetworkSpec

INTERFACE = "eth0"
"""A host's interface to the network."""
BURST_BYTES = 512 * 1024
"""Bytes that a host may send at once after it was quiet: 2 ms at 2 Gbit/s, and several of the largest segments."""
_LATENCY = "50ms"
"""How long a byte may queue in a host before it is dropped; TCP slows down first."""
_REMEDY = 'set launcher = "local"'
_NAME = re.compile(r"refshard-(?P<pid>\d+)-(?P<born>\d+)-\d+-(?:switch|host\d+)")
_PORT = 29500
"""Rank 0's store. Each launch makes hosts of its own, so the port is always free there."""
_serials = count(1)


class Network:
    """The hosts of a :class:`NetworkSpec`, as a context: made on entry and removed on every path out.

    Namespaces are named after the process that makes them and when it started (clock ticks after boot), since process
    ids are reused: so no two networks share a name, and leftovers differ from the network of a living run. A signal
    that raises in this process could cut the removal short: enter it within an ``Interruption``.

    Raises:
        LaunchError: on entry, if a command fails; what it made by then is removed.
    """

    program = "ip"
    """What enters a host."""

    def __init__(self, spec: NetworkSpec) -> None:
        self._spec = spec
        born = born_at(os.getpid())
        assert born is not None, "network namespaces need Linux, where this process has a start time"
        self.name = f"refshard-{os.getpid()}-{born}-{next(_serials)}"
        self.hosts = tuple(f"{self.name}-host{index}" for index in range(spec.hosts))

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.0.0.{host + 1}"

    def inside(self, host: int) -> tuple[str, ...]:
        """What follows :attr:`program` for a command to run on a host; ``ip`` becomes it: same process, same parent."""
        return ("netns", "exec", self.hosts[host])

    def commands(self) -> Iterator[tuple[str, ...]]:
        """The command lines that make the network, in order."""
        spec, switch = self._spec, f"{self.name}-switch"
        for name in (switch, *self.hosts):
            yield ("ip", "netns", "add", name)
        yield ("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        yield ("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, host in enumerate(self.hosts):
            port = f"port{index}"
            # Both ends are made in place: an interface that is never in the machine's namespace clashes with none.
            pair = ("link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            yield ("ip", "-n", host, *pair)
            yield ("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            yield ("ip", "-n", host, "address", "add", f"{self.address(index)}/24", "dev", INTERFACE)
            yield ("ip", "-n", host, "link", "set", "lo", "up")
            yield ("ip", "-n", host, "link", "set", INTERFACE, "up")
            bucket = ("rate", f"{spec.bits_per_s}bit", "burst", f"{BURST_BYTES}b", "latency", _LATENCY)
            yield ("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket)

    def __enter__(self) -> "Network":
        remove_leftovers()
        try:
            for command in self.commands():
                _run(command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        with ExitStack() as each:  # also after one of them failed
            for name in namespaces():
                if name in (f"{self.name}-switch", *self.hosts):
                    each.callback(_run, ("ip", "netns", "delete", name))


def namespaces() -> tuple[str, ...]:
    """Names of the network namespaces that refshard made and that are there now, of any run."""
    folder = Path("/run/netns")
    return tuple(sorted(p.name for p in folder.iterdir() if _NAME.fullmatch(p.name))) if folder.is_dir() else ()


def remove_leftovers() -> None:
    """Remove what killed runs left behind: networks of processes that are gone."""
    for name in namespaces():
        found = _NAME.fullmatch(name)
        assert found is not None
        if born_at(int(found["pid"])) != int(found["born"]):
            # Another run may be removing it too: that it is gone is what counts.
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, start_new_session=True)


def obstacle(platform: str, user: int, which: Callable[[str], str | None]) -> str | None:
    """Why no network can be made on ``platform`` as the user with the id ``user``, and the remedy; None if it can."""
    if platform != "linux":
        return f"launcher 'netlab' needs Linux, this is '{platform}'; {_REMEDY}"
    if user != 0:
        return f"launcher 'netlab' needs root, this is the user with id {user}; run as root, or {_REMEDY}"
    for program in ("ip", "tc"):
        if which(program) is None:
            return f"launcher 'netlab' needs the program '{program}', not found on PATH; install iproute2, or {_REMEDY}"
    return None


def check(spec: NetworkSpec) -> None:
    """Make the network once and remove it, so that a run which could not fails before anything is launched.

    Raises:
        LaunchError: this process cannot make it; with the cause and the remedy in one line.
    """
    if (found := obstacle(sys.platform, os.geteuid(), shutil.which)) is not None:
        raise LaunchError(found)
    with Interruption(), Network(spec):
        pass


def _run(command: tuple[str, ...]) -> None:
    # In a session of its own: Ctrl-C on the terminal must not end the command that removes a namespace.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LaunchError(
            f"launcher 'netlab': '{' '.join(command)}' failed ({said}); allow this process to make network namespaces "
            f"and tbf queues (CAP_SYS_ADMIN, CAP_NET_ADMIN), or {_REMEDY}"
        )


def born_at(pid: int) -> int | None:
    """When the process with this id started, in clock ticks after boot; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])  # field 22; the second is a name in parentheses, of any content


class NetlabLauncher(Launcher):
    """Makes the network anew for each launch, and spreads the ranks evenly over its hosts, in order.

    A single rank runs on host 0.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        self._spec = spec

    @contextmanager
    def start(self, program: Program, folder: Path) -> Iterator[Ranks]:
        """See :meth:`Launcher.start`.

        Raises:
            SpecError: the ranks cannot be spread evenly over the hosts.
            LaunchError: the network cannot be made.
        """
        network = Network(self._spec)
        ranks = placed(program, folder, network, self._spec.ranks_per_host(program.processes))
        with network, started(network.program, ranks, folder) as found:
            yield found

    def check(self, case: Case, *, oversubscribe: bool) -> None:
        check_fits_machine(case, case.processes, oversubscribe=oversubscribe)

    def environment(self, threads: int, run: Path, on_progress: Callable[[str], None]) -> Environment:
        return capture_environment(threads, self._spec.description)


def placed(
    program: Program, folder: Path, network: Network, per_host: int
) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """Each rank's arguments to the network's program, and its variables, ``per_host`` ranks to a host."""
    ranks = []
    for rank in range(program.processes):
        host, local_rank = divmod(rank, per_host)
        place = rank_environment(
            rank, local_rank, world_size=program.processes, local_world_size=per_host, address=network.address(0),
            port=_PORT,
        )  # fmt: skip
        # Gloo needs the interface: it would look up the machine's name, which has no address in this network.
        arguments = (*network.inside(host), sys.executable, *worker_arguments(program, folder))
        ranks.append((arguments, {**place, "GLOO_SOCKET_IFNAME": INTERFACE}))
    return ranks
