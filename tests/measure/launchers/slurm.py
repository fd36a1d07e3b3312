"""A real Slurm of one node, with everything that it needs in one folder: munged, slurmctld and slurmd (Linux, root)."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.measure.commandline import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
SLOTS = 4
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
MessageTimeout=5
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={slots} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=urgent Nodes={host} PriorityTier=9 PreemptMode=OFF State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The environment in which Slurm's commands find it, and the process id of its controller."""

    environment: Mapping[str, str]
    controller: int

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(command, capture_output=True, text=True, env=self.environment).stdout

    def jobs(self) -> list[str]:
        """Ids of the jobs that wait or run."""
        return self.ask("squeue", "--noheader", "--format=%A").split()

    def cancel_all(self) -> None:
        """End the jobs that a test which failed has left, and wait a while for it."""
        if left := self.jobs():
            self.ask("scancel", "--full", "--signal=KILL", *left)
            self.ask("scancel", *left)
            with suppress(AssertionError):
                wait_for(lambda: not self.jobs(), 30)


def obstacle() -> str | None:
    """Why no Slurm can be made here; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a Slurm of its own needs root"
    missing = [program for program in PROGRAMS if _find(program) is None]
    return f"no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


@contextmanager
def running_slurm(folder: Path) -> Iterator["Slurm"]:
    """Start it, with partitions ``main`` and ``urgent``."""
    folder.chmod(0o755)  # the socket is no secret
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    ports = _free_ports(2)
    configuration.write_text(
        CONFIGURATION.format(host=host, folder=folder, controller_port=ports[0], node_port=ports[1], slots=SLOTS)
    )
    (folder / "controller").mkdir()
    (folder / "node").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    with ExitStack() as ended:
        ended.callback(_end_what_is_left, configuration)
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
        given = [f"--{name}={path}" for name, path in files.items()]
        pids = {}
        for program, *options in (["munged", "--foreground", "--force", *given], ["slurmctld", "-D"], ["slurmd", "-D"]):
            pids[program] = ended.enter_context(_daemon(program, options, environment, folder))
            if program == "munged":
                wait_for((folder / "munge.socket").exists)
        made = Slurm(environment=environment, controller=pids["slurmctld"])
        ended.callback(made.cancel_all)
        wait_for(lambda: "idle" in made.ask("sinfo", "--noheader", "--format=%T"))
        yield made


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def _daemon(program: str, options: list[str], environment: Mapping[str, str], folder: Path) -> Iterator[int]:
    found = _find(program)
    assert found is not None
    with (folder / f"{program}.out").open("w") as said:
        process = subprocess.Popen([found, *options], env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_what_is_left(configuration: Path) -> None:
    """Once the daemons are gone: steps of jobs, and whoever waits for them, know the configuration by its path."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == str(configuration) and process.pid != os.getpid():
                process.kill()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
