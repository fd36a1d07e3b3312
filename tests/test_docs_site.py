"""The documentation site: its generated pages hold what the code has, and its pages need no network."""

import re

import pytest
import typer
import yaml
from typer.testing import CliRunner

import refshard
from refshard.cli import app
from refshard.specs.case import KEYS
from refshard.specs.suite import SuiteSpec
from refshard.strategies.table import ROWS
from tests.docs_modules import load
from tests.test_docs import DOCS, ROOT

pytestmark = pytest.mark.slow

reference = load("_reference")


def test_every_key_of_a_suite_has_a_meaning_and_no_other() -> None:
    for spec, meanings in reference.MEANINGS.items():
        fields = [field for field in spec.__struct_fields__ if field != "implementation"]  # code decides it
        assert set(meanings) == set(fields), f"docs/_reference.py: MEANINGS of {spec.__name__}"


def test_suite_keys_show_type_and_default_of_the_specs() -> None:
    page = reference.suite_page()
    for field in (*SuiteSpec.__struct_fields__, *KEYS):
        assert re.search(rf"^\| `{field}` \|", page, re.M), field
    assert '| `precision` | `"fp32"`, `"bf16"`, `"fp8"`, `"mxfp8"`, `"nvfp4"` | `"fp32"` |' in page
    assert "| `gpus` | integer | required |" in page
    assert "| `rounds` | integer | `1` |" in page
    assert "| `memory_limit_gib` | number |  |" in page


def test_the_page_of_commands_has_every_option_of_every_command() -> None:
    page = reference.commands_page()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) > 10
    for name, command in commands.items():
        section = page[page.index(f"\n## refshard {name}\n") :].split("\n## ")[1]
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
        printed = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        for option in options:
            assert f"`{option}`" in section, f"{name} {option}"
            assert option in printed


def test_strategies_and_the_public_api_are_whole() -> None:
    strategies, api = reference.suite_page(), reference.python_page()
    assert all(f"\n| `{name}` |" in strategies for name in ROWS)
    modules = {"checkpoint": ("save", "load", "full_state_dict"), "__version__": ()}
    for name in refshard.__all__:
        for called in modules.get(name, ("",)):
            assert f"heading: refshard.{name}{'.' * bool(called)}{called}\n" in api
    assert "::: refshard.engine.api.shard\n" in api


def test_every_page_is_in_the_navigation() -> None:
    pages = re.findall(r"[\w-]+(?:/[\w-]+)*\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
    written = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(pages) == sorted([*written, *reference.PAGES])


def test_fonts_and_scripts_come_with_the_site() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert "offline" in settings["plugins"]
    assert settings["strict"] is True


def test_a_broken_link_fails_the_build() -> None:
    """With --quiet, MkDocs counts no warnings, and a strict build passes."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"-m mkdocs build (.*)$", makefile, re.M) == ["--strict"]
    checked = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["validation"]
    assert set(checked["links"].values()) == {"warn"}


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', ["https://unpkg.com/x.js"]),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', ["//fonts.googleapis.com/css"]),
        ('<img src="https://example.com/a.png">', ["https://example.com/a.png"]),
        ('<script src="../assets/x.js"></script><link href="assets/x.css">', []),
        ('<a href="https://pytorch.org">torch</a><link rel="canonical" href="https://example.com">', []),
    ],
)
def test_what_a_page_would_load_from_the_network_is_found(html: str, found: list[str]) -> None:
    assert load("_offline").loads_from_network(html) == found
