"""``python -m tests.clients.run [NAME ...]``: frameworks from PyPI, unmodified, under ``refshard dryrun``.

Makes an environment for each set of pins in ``.clients/``, runs what ``clients.toml`` lists and prints a table. The
exit status is 1 if a run did not end as expected. ``make clients`` runs all of them.

A client that is not on PyPI is a commit of its repository, which is cloned, or lies in ``$CLIENTS_CHECKOUTS``. If there
is neither, the client is skipped with a message.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from tabulate import tabulate

from validation.schema import scripted_runs

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
ROOT = HERE.parent.parent
CLIENTS = ROOT / ".clients"
GIB = 2**30
HEADERS = (
    "client", "version", "command", "outcome", "time", "peak reserved", "published", "step", "needed, or refused by",
)  # fmt: skip


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A framework's command line and how it should end; the fields are explained in ``clients.toml``."""

    name: str
    package: str = ""
    checkout: str = ""
    commit: str = ""
    pins: str
    command: tuple[str, ...]
    prepare: tuple[str, ...] = ()
    cluster: str = "dgx-h100"
    world_size: int = 8
    environment: dict[str, str] = {}
    expected: Literal["stepped", "failed"] = "stepped"
    error: str = ""
    published: str = ""
    needed: str = ""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a client's run ended. ``step_s`` is None where no step was taken."""

    client: Client
    version: str
    outcome: str
    error: str
    wall_s: float
    peak_reserved_bytes: int
    peak_active_bytes: int = 0
    step_s: float | None

    @property
    def as_expected(self) -> bool:
        """Whether it ended in the way that ``clients.toml`` tells."""
        return self.outcome == self.client.expected and self.client.error in self.error


def load_clients(names: Sequence[str] = ()) -> tuple[Client, ...]:
    """The clients of these names, or all.

    Raises:
        ValueError: there is no client of a name.
    """
    listed = msgspec.toml.decode((HERE / "clients.toml").read_bytes(), type=dict[str, list[Client]])["clients"]
    known = {client.name: client for client in listed}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no client '{unknown[0]}'; there are: {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def environment_of(pins: str) -> Path:
    """The environment's Python; made anew if its pins have changed.

    Raises:
        CalledProcessError: pip could not install it.
    """
    folder, listed = CLIENTS / pins, HERE / f"{pins}.txt"
    python, marker = folder / "bin" / "python", folder / ".installed"
    digest = hashlib.sha256(listed.read_bytes()).hexdigest()
    if marker.exists() and marker.read_text() == digest:
        return python
    print(f"installing {listed.name} into {folder.relative_to(ROOT)} (a few minutes)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "--requirement", str(listed)], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    marker.write_text(digest)
    return python


def repository_of(client: Client) -> Path | None:
    """A clone with the client's commit, or None if there is none and git cannot fetch it."""
    given = os.environ.get("CLIENTS_CHECKOUTS")
    folder = Path(given or CLIENTS / "checkouts") / client.checkout.rsplit("/", 1)[-1]
    if not given and not folder.exists():
        subprocess.run(["git", "clone", "--quiet", client.checkout, str(folder)])
    has = ["git", "-C", str(folder), "cat-file", "-e", client.commit]
    return folder if subprocess.run(has, capture_output=True).returncode == 0 else None


def check_out(client: Client, folder: Path) -> None:
    """Put the client's commit into a folder, and leave the clone as it is."""
    archive = ["git", "-C", str(repository_of(client)), "archive", client.commit]
    tar = subprocess.run(archive, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=tar, check=True)


def run(client: Client) -> Ended:
    """Run a client; what it prints goes to ``log`` in its folder."""
    folder = CLIENTS / "work" / client.name
    folder.mkdir(parents=True, exist_ok=True)
    if client.checkout:
        check_out(client, folder)
    python = environment_of(client.pins)
    for script in (("standins.py", "standins"), client.prepare):
        if script:
            subprocess.run([str(python), str(SCRIPTS / script[0]), *script[1:]], cwd=folder, check=True)
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [str(python), *command_of(client)], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True,
            env=variables_of(client, python),
        )  # fmt: skip
    if not done.stdout:
        raise RuntimeError(f"{client.name}: refshard ended with status {done.returncode}; see {folder / 'log'}")
    version = version_of(client.package, python) if client.package else client.commit[:8]
    return ended(client, version, msgspec.json.decode(done.stdout))


def command_of(client: Client) -> tuple[str, ...]:
    """What Python is given."""
    asked = ("--json", "--cluster", client.cluster, "--gpus", str(client.world_size))
    return "-m", "refshard", "dryrun", *asked, "--", *(word.format(scripts=SCRIPTS) for word in client.command)


def variables_of(client: Client, python: Path) -> dict[str, str]:
    """The environment of an activated virtual environment on a machine without a network."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **client.environment}


def version_of(package: str, python: Path) -> str:
    """The version that is installed."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def ended(client: Client, version: str, found: dict[str, Any]) -> Ended:
    """From what ``refshard dryrun --json`` printed."""
    answer = found["answer"]
    return Ended(
        client=client, version=version, outcome=answer["outcome"], error=answer["error"], wall_s=answer["wall_s"],
        peak_reserved_bytes=answer["peak"]["reserved"], peak_active_bytes=answer["peak"]["active"],
        step_s=found["step_s"],
    )  # fmt: skip


def published(one: Ended) -> str:
    """The published run's memory: reserved, or if it only has that, active with this run's."""
    run = scripted_runs()[one.client.published].run
    if run.reserved_gib is not None:
        return f"{run.reserved_gib} GiB"
    return f"{run.active_gib} GiB active (here {one.peak_active_bytes / GIB:.2f})"


def row(one: Ended) -> tuple[str, ...]:
    """A row of the table."""
    outcome = one.outcome if one.as_expected else f"{one.outcome}: NOT AS EXPECTED"
    return (
        one.client.name,
        one.version,
        " ".join(word.format(scripts=".") for word in one.client.command)[:60],
        outcome,
        f"{one.wall_s:.0f} s",
        f"{one.peak_reserved_bytes / GIB:.2f} GiB" if one.outcome == "stepped" else "-",
        published(one) if one.client.published else "-",
        f"{one.step_s * 1000:.0f} ms" if one.step_s else "-",
        (one.error or one.client.needed)[:120],
    )


def run_all(clients: Sequence[Client]) -> Iterator[Ended]:
    """Run one after the other, and say so."""
    for client in clients:
        print(f"{client.name} ...", file=sys.stderr, flush=True)
        if client.checkout and repository_of(client) is None:
            print(f"skipped: {client.checkout} cannot be cloned; see CLIENTS_CHECKOUTS", file=sys.stderr, flush=True)
        else:
            yield run(client)


def main(names: Sequence[str]) -> int:
    """Run the clients of these names, or all, and return the exit status."""
    done = tuple(run_all(load_clients(names)))
    print(tabulate([row(one) for one in done], headers=HEADERS))
    return 0 if all(one.as_expected for one in done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
