"""Where suites, profiles and dashboards lie, and how many cores there are.

In a checkout they are next to the package, where visitors look for them; in a wheel they are inside it. Only
this file knows.
"""

import os
from pathlib import Path

BASELINES = Path("profiles") / "baselines"
"""Where accepted baselines lie, and the noise of machines: in the folder of whoever holds the gate, not of refshard."""
_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """The folder that holds ``suites/``, ``profiles/`` and ``dashboards/``."""
    inside_wheel = _PACKAGE / "_resources"
    return inside_wheel if inside_wheel.is_dir() else _PACKAGE.parent


def checkout() -> Path | None:
    """The source checkout that this package runs from, or None when it was installed from a wheel."""
    beside = _PACKAGE.parent
    return beside if (beside / "pyproject.toml").is_file() and (beside / ".git").exists() else None


def install_extra(extra: str) -> str:
    """The remedy for a missing optional package. refshard is on no package index, so its checkout installs them.

    >>> install_extra("peers")
    "pip install -e '.[peers]' in refshard's checkout"
    """
    return f"pip install -e '.[{extra}]' in refshard's checkout"


def model_profiles() -> dict[str, Path]:
    """Model presets by name."""
    return {p.stem: p for p in sorted((root() / "profiles" / "models").glob("*.toml"))}


def hardware_profiles() -> dict[str, Path]:
    """Accelerators by name."""
    return {p.stem: p for p in sorted((root() / "profiles" / "hardware").glob("*.toml"))}


def cluster_profiles() -> dict[str, Path]:
    """Clusters by name."""
    return {p.stem: p for p in sorted((root() / "profiles" / "clusters").glob("*.toml"))}


def aliases() -> Path:
    """Further names of profiles."""
    return root() / "profiles" / "aliases.toml"


def suites() -> dict[str, Path]:
    """Suites that ship with refshard, by name."""
    return {p.stem: p for p in sorted((root() / "suites").glob("*.toml"))}


def available_cores() -> int:
    """Logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def dashboards() -> Path:
    """Folder of the dashboard's templates and styles."""
    return root() / "dashboards"


def spread() -> Path:
    """How far published step times lie from their predictions."""
    return root() / "profiles" / "spread.toml"
