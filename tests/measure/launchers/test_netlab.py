"""Hosts joined by a network: which commands make it, and that it is real, limited, and gone afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from refshard.errors import LaunchError
from refshard.measure.launchers.base import Program
from refshard.measure.launchers.netlab import (
    BURST_BYTES,
    NetlabLauncher,
    Network,
    born_at,
    check,
    namespaces,
    obstacle,
    placed,
    remove_leftovers,
)
from refshard.measure.store import read_run
from refshard.measure.worker import request_file
from refshard.specs.case import Case
from refshard.specs.suite import NetworkSpec
from tests.measure.commandline import processes_of, wait_for, write_suite
from tests.measure.faults import running

TWO = NetworkSpec(hosts=2, rate="100mbit")


def job(processes: int, time_limit_s: float = 120.0) -> Program:
    return Program(name="case", processes=processes, time_limit_s=time_limit_s)


def netlab_suite(folder: Path, *strategies: str, rate: str, steps: int = 3) -> Path:
    head = f'launcher = "netlab"\nnetwork = {{ hosts = 2, rate = "{rate}" }}'
    return write_suite(folder, *strategies, ranks=2, steps=steps, head=head)


def namespaces_of(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"refshard-{pid}-")]


@pytest.fixture(scope="module")
def hosts_can_be_made() -> None:
    try:
        check(TWO)
    except LaunchError as error:
        pytest.skip(str(error))


real = pytest.mark.usefixtures("hosts_can_be_made")


@pytest.mark.skipif(sys.platform != "linux", reason="a network is named after a Linux process")
def test_the_commands_that_make_a_network() -> None:
    network = Network(TWO)
    made = [" ".join(command) for command in network.commands()]
    switch, first, second = f"{network.name}-switch", f"{network.name}-host0", f"{network.name}-host1"
    assert made == [
        f"ip netns add {switch}",
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip -n {switch} link add bridge type bridge",
        f"ip -n {switch} link set bridge up",
        f"ip -n {first} link add eth0 type veth peer name port0 netns {switch}",
        f"ip -n {switch} link set port0 master bridge up",
        f"ip -n {first} address add 10.0.0.1/24 dev eth0",
        f"ip -n {first} link set lo up",
        f"ip -n {first} link set eth0 up",
        f"tc -n {first} qdisc add dev eth0 root tbf rate 100000000bit burst 524288b latency 50ms",
        f"ip -n {second} link add eth0 type veth peer name port1 netns {switch}",
        f"ip -n {switch} link set port1 master bridge up",
        f"ip -n {second} address add 10.0.0.2/24 dev eth0",
        f"ip -n {second} link set lo up",
        f"ip -n {second} link set eth0 up",
        f"tc -n {second} qdisc add dev eth0 root tbf rate 100000000bit burst 524288b latency 50ms",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="a network is named after a Linux process")
def test_ranks_fill_one_host_after_the_other(tmp_path: Path) -> None:
    network = Network(TWO)
    arguments, environments = zip(*placed(job(processes=4), tmp_path, network, TWO.ranks_per_host(4)))
    worker = (sys.executable, "-m", "refshard.measure.worker", "case", str(tmp_path), str(os.getpid()))
    assert list(arguments) == [(*network.inside(host), *worker) for host in (0, 0, 1, 1)]
    assert [name.rpartition("-")[2] for _, _, name, *_ in arguments] == ["host0", "host0", "host1", "host1"]
    assert [(e["RANK"], e["LOCAL_RANK"]) for e in environments] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    for environment in environments:
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (environment["MASTER_ADDR"], environment["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1", "eth0")


@pytest.mark.skipif(sys.platform != "linux", reason="a network is named after a Linux process")
def test_a_single_rank_runs_on_the_first_host(tmp_path: Path) -> None:
    network = Network(TWO)
    ((arguments, _),) = placed(job(processes=1), tmp_path, network, TWO.ranks_per_host(1))
    assert arguments[:3] == network.inside(0)


def test_no_two_networks_share_a_name() -> None:
    assert len({name for _ in range(2) for name in Network(TWO).hosts}) == 4


@pytest.mark.parametrize(
    ("platform", "user", "missing", "message"),
    [
        ("darwin", 0, "", "launcher 'netlab' needs Linux, this is 'darwin'; set launcher = \"local\""),
        ("linux", 1000, "", "launcher 'netlab' needs root, this is the user with id 1000; run as root, or set"),
        ("linux", 0, "ip", "launcher 'netlab' needs the program 'ip', not found on PATH; install iproute2, or set"),
        ("linux", 0, "tc", "launcher 'netlab' needs the program 'tc', not found on PATH; install iproute2, or set"),
    ],
)
def test_what_is_in_the_way_is_told_with_its_remedy(platform: str, user: int, missing: str, message: str) -> None:
    found = obstacle(platform, user, lambda program: None if program == missing else f"/sbin/{program}")
    assert found is not None
    assert found.startswith(message)
    assert obstacle("linux", 0, lambda program: f"/sbin/{program}") is None


@pytest.mark.full
def test_a_run_that_cannot_make_hosts_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    suite = netlab_suite(tmp_path, "single", rate="1gbit")
    with running("run", suite, "--out", tmp_path / "run", env={**os.environ, "PATH": "/nowhere"}) as process:
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 3
    assert err.startswith("refshard: launcher 'netlab' needs ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
for _ in range(200):
    try:
        peer = socket.create_connection((address, 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
started = time.perf_counter()
peer.sendall(bytes(size))
peer.shutdown(socket.SHUT_WR)
received = int(peer.recv(100))
print(received, time.perf_counter() - started)
"""
RECEIVE = """
import socket
peer, _ = socket.create_server(("", 5000)).accept()
received = 0
while found := peer.recv(1 << 20):
    received += len(found)
peer.sendall(str(received).encode())
"""


def transfer(network: Network, size: int) -> tuple[int, float]:
    """Send ``size`` bytes from host 0 to host 1: bytes that arrived, and seconds."""
    receiver = subprocess.Popen([network.program, *network.inside(1), sys.executable, "-c", RECEIVE])
    try:
        send = [network.program, *network.inside(0), sys.executable, "-c", SEND, network.address(1), str(size)]
        received, seconds = subprocess.run(send, check=True, capture_output=True, text=True, timeout=60).stdout.split()
        return int(received), float(seconds)
    finally:
        receiver.kill()
        receiver.wait()


@pytest.mark.processes
@real
def test_a_transfer_takes_what_the_rate_demands() -> None:
    size = 6 * 2**20
    with Network(TWO) as network:
        received, seconds = transfer(network, size)
    assert received == size
    assert seconds >= (size - BURST_BYTES) * 8 / TWO.bits_per_s


@pytest.mark.processes
@real
def test_networks_do_not_touch_each_other_or_the_machine_and_go_after_an_exception() -> None:
    def interfaces() -> set[str]:
        return {path.name for path in Path("/sys/class/net").iterdir()}

    def use() -> None:
        with Network(TWO) as first, Network(TWO) as second:
            assert len(namespaces_of(os.getpid())) == 6
            assert [transfer(network, 1000)[0] for network in (first, second)] == [1000, 1000]
            assert interfaces() == before
            raise ZeroDivisionError

    before = interfaces()
    with pytest.raises(ZeroDivisionError):
        use()
    assert not namespaces_of(os.getpid())


class Impossible(NetworkSpec, frozen=True, kw_only=True):
    """A network whose queues no tc makes."""

    @property
    def bits_per_s(self) -> int:
        return -1


@pytest.mark.processes
@real
def test_a_network_that_cannot_be_finished_is_removed_and_says_why() -> None:
    with pytest.raises(LaunchError, match=r"'tc -n \S+ qdisc add .* rate -1bit .*' failed \(.+\); allow this process"):
        check(Impossible(hosts=2, rate="1gbit"))
    assert not namespaces_of(os.getpid())


HOLD = """
import time
from refshard.measure.launchers.netlab import Network
from refshard.specs.suite import NetworkSpec
with Network(NetworkSpec(hosts=2, rate="100mbit")):
    print("made", flush=True)
    time.sleep(600)
"""


@pytest.mark.full
@real
def test_what_a_killed_run_left_is_removed_and_a_living_runs_network_is_not() -> None:
    held = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    try:
        assert held.stdout.readline() == "made\n"
        remove_leftovers()
        assert len(namespaces_of(held.pid)) == 3
    finally:
        held.kill()
        held.communicate()
    assert len(namespaces_of(held.pid)) == 3
    with Network(TWO):
        assert not namespaces_of(held.pid)


def test_a_process_is_told_from_a_later_one_with_its_id() -> None:
    assert born_at(os.getpid()) == born_at(os.getpid())
    assert born_at(2**31 - 1) is None


@pytest.mark.processes
@real
def test_a_suite_runs_over_the_network(tmp_path: Path) -> None:
    suite = netlab_suite(tmp_path, "single", "ddp", rate="500mbit")
    with running("run", suite, "--out", tmp_path / "run") as process:
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    run = read_run(tmp_path / "run")
    assert run.header.environment.network == "2 hosts joined at 500 Mbit/s (network namespaces)"
    (ddp,) = (record for record in run.launches if record.case.job.strategy == "ddp")
    assert ddp.proof is not None
    # A ring of two: each host sends as many bytes as it reduces. Loopback is several times faster than this.
    sent = sum(collective.bytes for collective in ddp.proof.announced)
    assert min(map(min, ddp.step_times_s)) >= (sent - BURST_BYTES) * 8 / 500e6 > 0.1
    assert not namespaces_of(process.pid)
    assert not processes_of(tmp_path / "run")


def endless(folder: Path, strategy: str, world_size: int, time_limit_s: float = 120.0) -> Program:
    """A case that does not end by itself, laid down for its ranks."""
    case = Case.of(
        strategy=strategy, gpus=world_size, model="llama-tiny", device="cpu", global_batch=4, seq_len=16,
        measured_steps=100_000, time_limit_s=time_limit_s,
    )  # fmt: skip
    request_file(folder, "case").write_bytes(msgspec.json.encode(case))
    return job(world_size, time_limit_s)


@pytest.mark.full
@real
def test_an_interruption_leaves_neither_namespace_nor_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running("run", netlab_suite(tmp_path, "single", rate="1gbit", steps=100_000), "--out", run) as process:
        wait_for(lambda: list(run.glob("cases/single*/progress")), 120)
        assert len(namespaces_of(process.pid)) == 3
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=1800)
    assert process.returncode == 130, err
    assert not namespaces_of(process.pid)
    assert not processes_of(run)


@pytest.mark.full
@real
def test_a_run_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running("run", netlab_suite(tmp_path, "single", rate="1gbit", steps=100_000), "--out", run) as process:
        wait_for(lambda: list(run.glob("cases/single*/progress")), 120)
        process.kill()
        process.communicate()
    wait_for(lambda: not processes_of(run))
    remove_leftovers()
    assert not namespaces_of(process.pid)


@pytest.mark.full
@real
def test_an_exception_while_ranks_run_leaves_neither_namespace_nor_process(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        assert len(namespaces_of(os.getpid())) == 3
        assert len(processes_of(tmp_path)) == 2
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError):
        NetlabLauncher(TWO).launch(endless(tmp_path, "ddp", 2), tmp_path, fail)
    assert not namespaces_of(os.getpid())
    assert not processes_of(tmp_path)


@pytest.mark.processes
@real
def test_a_case_that_hangs_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    shown: list[str] = []
    launch = NetlabLauncher(TWO).launch(endless(tmp_path, "single", 1, time_limit_s=3.0), tmp_path, shown.append)
    assert launch.timed_out
    assert not namespaces_of(os.getpid())
    assert not processes_of(tmp_path)
