"""The layers: who may import whom, and what the public face is."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import refshard

PACKAGE = Path(refshard.__file__).parent
VALIDATION = PACKAGE.parent / "validation"
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"


def drawn_layers() -> dict[str, int]:
    """Each package's layer, from 1 at the bottom, in the picture of the page on architecture."""
    picture = PAGE.read_text().partition("## Layers")[2].partition("```text\n")[2].partition("```")[0]
    names = [re.split(r" {3,}", line)[0].split() for line in reversed(picture.splitlines())]
    return {name: layer for layer, line in enumerate(names, 1) for name in line}


LAYERS = drawn_layers()
LAYERS |= {"__init__": LAYERS["cli"], "__main__": LAYERS["cli"] + 1}
OPTIONAL = {
    "triton_driver.py": {"triton"},
    "triton_kernels.py": {"triton"},
    "accelerate_fsdp2.py": {"accelerate"},
    "compile.py": {"torchgen"},
    "adapters.py": {"peft"},
    "deepspeed_zero.py": {"deepspeed"},
    "hf_trainer.py": {"greenlet", "transformers"},
    "hta.py": {"hta"},
    "optimizer.py": {"torchao"},
    "megatron_fsdp.py": {"megatron_fsdp"},
    "nf4.py": {"bitsandbytes"},
    "nvml.py": {"pynvml"},
    "replay.py": {"pytest"},
    "pytest_plugin.py": {"pytest"},
    "transformers_llama.py": {"transformers"},
}
"""What a file may import besides, for whoever calls it has installed it."""
SOURCES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Full names of what a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            inside = node.module == "refshard"
            found |= {f"refshard.{a.name}" for a in node.names} if inside else {node.module or ""}
    return found


@cache
def imports() -> dict[Path, set[str]]:
    """What each file imports."""
    return {path: imported_modules(path) for path in SOURCES}


def imported_packages(modules: set[str]) -> set[str]:
    """Packages of refshard among these modules; what its own ``__init__`` offers is the package ``__init__``."""
    inside = [parts for module in modules if (parts := module.split("."))[0] == "refshard"]
    return {parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__" for parts in inside}


def test_packages_import_strictly_lower_layers() -> None:
    offenders = [
        f"{path.relative_to(PACKAGE)} (layer {LAYERS[mine]}) imports {other} (layer {LAYERS[other]})"
        for path, modules in imports().items()
        for mine in [package_of(path)]
        for other in imported_packages(modules) - {mine}
        if LAYERS[other] >= LAYERS[mine]
    ]
    assert not offenders


def test_every_package_has_a_layer() -> None:
    assert {package_of(path) for path in SOURCES} <= LAYERS.keys()


def test_refshard_never_imports_validation_which_a_wheel_has_not() -> None:
    tops = {module.partition(".")[0] for modules in imports().values() for module in modules}
    assert "validation" not in tops
    assert "refshard" in {m.partition(".")[0] for path in VALIDATION.glob("*.py") for m in imported_modules(path)}


def test_what_is_imported_is_declared() -> None:
    """Every distribution is named in pyproject.toml: no import lives by what another package happens to bring."""
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", requirement)[0] for requirement in declared} | sys.stdlib_module_names | {"refshard"}
    beside = {
        path: imported_modules(path) - {f"validation.{one.stem}" for one in VALIDATION.glob("*.py")}
        for path in VALIDATION.glob("*.py")
    }
    offenders = {
        str(path.relative_to(PACKAGE.parent)): undeclared
        for path, modules in (imports() | beside).items()
        if (undeclared := {m.partition(".")[0] for m in modules} - names - OPTIONAL.get(path.name, set()))
    }
    assert not offenders


@pytest.mark.slow
def test_no_file_needs_refshard_to_be_installed() -> None:
    """A tree that is only on Python's path has no metadata: its version is ``refshard.__version__``."""
    asking = {"distribution", "files", "metadata", "requires", "version"}
    offenders = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and [ast.unparse(argument) for argument in node.args] == ["'refshard'"]
        if ast.unparse(node.func).rpartition(".")[2] in asking
    }
    assert not offenders


def test_public_face() -> None:
    names = [
        "Policy",
        "Precision",
        "__version__",
        "checkpoint",
        "clip_grad_norm_",
        "dry_run",
        "full_parameters",
        "local_parameters",
        "no_sync",
        "read_run",
        "read_trace",
        "register_forward_method",
        "reshard",
        "shard",
        "unshard",
        "whole_tensors",
    ]
    assert sorted(refshard.__all__) == names
    for name in refshard.__all__:
        assert getattr(refshard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        refshard.shrad  # noqa: B018


def modules_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.processes
def test_importing_refshard_or_its_command_line_does_not_import_torch() -> None:
    assert "torch" not in modules_after("import refshard, refshard.cli")


@pytest.mark.processes
def test_a_rank_imports_nothing_heavier_than_torch() -> None:
    heavy = {"pandas", "plotly", "scipy", "rich", "typer", "tabulate", "jinja2", "psutil", "transformers"}
    assert not modules_after("import refshard.measure.rank, refshard.measure.calibration.rank") & heavy
