"""Which torch refshard accepts and what ran on it, and that its page lists all that is private of torch's."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import refshard
from refshard.dryrun.environments import OLDEST_TORCH
from refshard.fakecuda.build import TRIED

pytestmark = pytest.mark.slow

PACKAGE = Path(refshard.__file__).parent
ROOT = PACKAGE.parent
PAGE = Path(__file__).with_name("torch_versions.md").read_text()
PYTHONS_OWN = {"os", "sys"}


def minor(version: str) -> tuple[int, int]:
    """Its first two numbers."""
    major, minor_, *_ = version.split(".")
    return int(major), int(minor_)


@pytest.fixture(scope="module")
def bounds() -> tuple[tuple[int, int], tuple[int, int]]:
    """The oldest minor version that pyproject.toml accepts, and the first that it does not."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (least, most) = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", next(d for d in dependencies if "torch" in d)).groups()  # type: ignore[union-attr]
    return minor(least), minor(most)


def test_the_page_says_what_ran_on_each_torch_that_is_accepted(
    bounds: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """Raise the bound, the pin and the table together."""
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert bounds[0] <= minor(torch.__version__) < bounds[1], f"these tests run on torch {torch.__version__}"
    assert f"torch {pinned[1]}" in PAGE.replace("\n", " ")
    assert bounds[0] == OLDEST_TORCH
    assert minor(pinned[1]) == TRIED
    assert f"`torch>={'.'.join(map(str, bounds[0]))},<{'.'.join(map(str, bounds[1]))}`" in PAGE
    rows = {version: row for row in re.findall(r"^\| 2\.\d+.*$", PAGE, re.M) for version in re.findall(r"\d\.\d+", row)}
    assert {minor(version) for version in rows} >= {(2, number) for number in range(bounds[0][1], bounds[1][1])}
    tritons = {minor(version) for row in set(rows.values()) for version in re.findall(r"\b3\.\d+", row.split("|")[2])}
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["compiled"]
    least, most = re.match(r"triton>=([\d.]+),<([\d.]+);", extra[0]).groups()  # type: ignore[union-attr]
    assert (min(tritons), (3, max(tritons)[1] + 1)) == (minor(least), minor(most))
    tried = {minor(row.split()[1].strip(",")) for row in rows.values() if "not tried" not in row}
    assert tried == {TRIED}


def dotted(node: ast.AST) -> list[str]:
    """``a.b.c`` as a list; empty if it begins with anything else than a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports(tree: ast.Module) -> dict[str, str]:
    """What each name that is imported from torch, or from Python's own modules, stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0]: alias for alias in node.names}
            found |= {name: alias.name if alias.asname else name for name, alias in names.items()}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in found.items() if full.split(".")[0] in {"torch", *PYTHONS_OWN}}


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that refshard defines: functions, classes, fields and attributes of ``self``."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for inner in (inner for target in targets for inner in ast.walk(target)):
            if isinstance(inner, ast.Name):
                found.add(inner.id)
            elif isinstance(inner, ast.Attribute) and dotted(inner)[:1] in (["self"], ["cls"]):
                found.add(inner.attr)
    return found


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What is private in a file's imports and attributes and not refshard's own: ``torch._a.b``, or ``._a``."""
    known = imports(tree)
    chains = [(node, dotted(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_torch = [name for name in known.values() if name.startswith("torch.")]
    for node, chain in chains:
        root = known.get(chain[0], "") if chain else ""
        if root.split(".")[0] == "torch":
            of_torch.append(".".join([root, *chain[1:]]))
        elif is_private(node.attr) and root not in PYTHONS_OWN and node.attr not in own:
            yield f".{node.attr}"
    yield from (name for name in of_torch if any(map(is_private, name.split("."))))


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    """By file, its private names, without those that only lead to others."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = own_names(list(trees.values()))
    found = {}
    for path, tree in trees.items():
        names = set(private_names(tree, own))
        if names := {name for name in names if not any(other.startswith(f"{name}.") for other in names)}:
            found[str(path.relative_to(PACKAGE))] = names
    return found


def listed() -> dict[str, set[str]]:
    """By file, the names in the page's table."""
    found: dict[str, set[str]] = defaultdict(set)
    for file, names in re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \|", PAGE, re.M):
        found[file] |= set(re.findall(r"`([\w.]+)`", names))
    return found


def test_the_page_lists_what_is_private_by_file(used: dict[str, set[str]]) -> None:
    on_page = listed()
    missing = {file: names - on_page[file] for file, names in used.items() if names - on_page[file]}
    assert not missing, "add them to the table of tests/torch_versions.md"


def test_the_page_lists_nothing_that_is_gone() -> None:
    """Some names on the page are such as refshard's classes have too, because torch asks for them."""
    for file, names in listed().items():
        source = (PACKAGE / file).read_text()
        gone = [name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", source)]
        assert not gone, f"{file} does not use them any more"
