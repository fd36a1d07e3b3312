"""An answer as one HTML file that needs nothing else: it opens from disk and asks the network for nothing.

Names of modules and kernels, lines of scripts, errors and logs come from outside: Jinja2 escapes them in the page,
``tojson`` in its data, and the page's content security policy runs only the page's own scripts, by hash.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from refshard import resources
from refshard.report.blocks import Answer, Section, Verdict, cell_text
from refshard.report.draw.charts import theme

PLOTLY = "plotly-basic.min.js.gz"
"""plotly.js, its bundle of bars and curves, compressed: the page's script inflates it."""
SCRIPTS = ("charts.js", "tables.js", "perfetto.js")
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|us|ms|s|B|[KMG]iB(?:/s)?)(?:\W|$))")


def as_page(answer: Answer, *, product: str, command: str) -> Iterable[str]:
    """The HTML in pieces, in order. ``product`` is the command that answers, ``command`` the line that made the page.

    The verdict comes first, with all blocks before the first section.
    """
    assert answer.cover is not None
    blocks = [block for block in answer.blocks if block.where != "terminal"]
    return filled(
        "page.html.j2",
        title=answer.cover.title,
        cover=answer.cover,
        product_name=product,
        lead=[sentence for block in blocks if isinstance(block, Verdict) for sentence in block.sentences],
        first=[block for block in blocks if not isinstance(block, (Verdict, Section))],
        sections=[block for block in blocks if isinstance(block, Section)],
        command=command,
    )


def filled(
    template: str, *, scripts: Sequence[str] = SCRIPTS, styles: Sequence[str] = ("style.css",),
    data: dict[str, Any] | None = None, **content: Any,
) -> Iterable[str]:  # fmt: skip
    """A template's HTML in pieces; ``data`` is for the page's scripts, besides the charts' theme."""
    templates = Environment(
        loader=FileSystemLoader(resources.dashboards()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["unbroken"] = unbroken
    packed, inflated = _plotly()
    # An HTML parser hands a script to the browser, which hashes it, without carriage returns.
    texts = [_resource(name).replace("\r\n", "\n").replace("\r", "\n") for name in scripts]
    return templates.get_template(template).generate(
        **content,
        text_of=cell_text,
        data={"theme": theme(), **(data or {})},
        style=Markup("".join(map(_resource, styles))),
        scripts=[Markup(script) for script in texts],
        plotly=packed,
        script_hashes=[*map(_hash, texts), inflated],
    )


def unbroken(text: str) -> str:
    r"""Text in which no line breaks between a number and its unit.

    >>> unbroken("17.3 % of 538 ms in 3 steps").split(" ")
    ['17.3\xa0%', 'of', '538\xa0ms', 'in', '3', 'steps']
    """
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)


def _resource(name: str) -> str:
    return (resources.dashboards() / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _plotly() -> tuple[str, str]:
    """The bundle as base64, and the hash of what it inflates to."""
    packed = (resources.dashboards() / PLOTLY).read_bytes()
    return base64.b64encode(packed).decode(), _hash(gzip.decompress(packed).decode())


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
