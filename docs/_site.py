"""MkDocs hook: generates the reference pages from the code, and keeps the site readable without a network.

Generated pages exist only in the built site, so they cannot drift from the code.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from _offline import loads_from_network  # noqa: E402
from _reference import PAGES  # noqa: E402  (it imports refshard from the checkout)

SOURCE = "source"
"""Where the site shows files of the repository that pages link to."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".md": "markdown"}
COPIED = {".html", ".png", ".svg"}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the repository's files that pages link to."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for path in sorted(_linked_files(files)):
        if path.suffix in COPIED:
            files.append(File.generated(config, f"{SOURCE}/{path}", abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, f"{SOURCE}/{path}.md", content=_listing(path), inclusion=_hidden()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their copies in the site; a folder is named, not linked."""
    here = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = _outside(link[2], here)
        if path is None:
            return link[0]
        if (ROOT / path).is_dir():
            return link[1][1:-1] if "`" in link[1] or "/" not in link[1] else f"`{link[1][1:-1]}`"
        shown = f"{SOURCE}/{path}" if path.suffix in COPIED else f"{SOURCE}/{path}.md"
        return f"{link[1]}({posixpath.relpath(shown, here or '.')})"

    return LINK.sub(replaced, markdown) if not here.startswith(SOURCE) else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the roles of docstrings (``:class:`~a.b.Name```) as plain code."""
    role = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(~?)([\w.]+)</code>")
    return role.sub(lambda m: f"<code>{m[2].rpartition('.')[2] if m[1] else m[2]}</code>", html)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page would load anything from the network.

    Raises:
        PluginError: it names the page and what it would load.
    """
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        if SOURCE not in page.relative_to(site).parts and (found := loads_from_network(page.read_text())):
            raise PluginError(f"{page.relative_to(site)} loads from the network: {', '.join(found)}")


def _linked_files(files: Files) -> set[Path]:
    """Files of the repository outside of docs/ that the pages link to."""
    found: set[Path] = set()
    for file in files.documentation_pages():
        for link in LINK.finditer(file.content_string):
            path = _outside(link[2], posixpath.dirname(file.src_uri))
            if path is not None and (ROOT / path).is_file():
                found.add(path)
    return found


def _outside(target: str, here: str) -> Path | None:
    """The path in the repository that a link leads to if it leaves docs/; None for any other link."""
    if "://" in target:
        return None
    path = posixpath.normpath(posixpath.join("docs", here, target))
    return None if path.startswith(("docs/", "..")) else Path(path)


def _listing(path: Path) -> str:
    text = (ROOT / path).read_text()
    language = LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\ntitle: {path.name}\n---\n\n# `{path}`\n\n````{language}\n{text}\n````\n"


def _hidden() -> Any:
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV
