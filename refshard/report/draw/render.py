"""Templates to pages that need nothing else; computes no figure, only lays out what the views give.

Names, errors and logs come from outside and are hostile until escaped: Jinja2 escapes them in a page, ``tojson`` in its
data, and the page's content security policy runs no script but its own, by hash.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from refshard import resources

PLOTLY = "plotly-basic.min.js.gz"
"""plotly.js, its bundle of bars and curves, compressed: the page's script inflates it."""
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|us|ms|s|B|[KMG]iB(?:/s)?)(?:\W|$))")


def fill(template: str, content: dict[str, Any], *, style: str, scripts: list[str]) -> Iterable[str]:
    """A template's HTML in pieces; its content security policy runs ``scripts`` and plotly by hash, and no other.

    The page carries plotly as packed data.
    """
    templates = Environment(
        loader=FileSystemLoader(resources.dashboards()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["unbroken"] = unbroken
    packed, inflated = _plotly()
    return templates.get_template(template).generate(
        **content,
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        plotly=packed,
        script_hashes=[*map(_hash, scripts), inflated],
    )


def unbroken(text: str) -> str:
    r"""Text in which no line breaks between a number and its unit.

    >>> unbroken("17.3 % of 538 ms in 3 steps").split(" ")
    ['17.3\xa0%', 'of', '538\xa0ms', 'in', '3', 'steps']
    """
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)


def resource(name: str) -> str:
    """The text of a file beside the templates."""
    return (resources.dashboards() / name).read_text(encoding="utf-8")


def script(text: str) -> str:
    """A script as an HTML parser will hand it to the browser, which hashes that."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@lru_cache(maxsize=1)
def _plotly() -> tuple[str, str]:
    """The bundle as base64, and the hash of what it inflates to."""
    packed = (resources.dashboards() / PLOTLY).read_bytes()
    return base64.b64encode(packed).decode(), _hash(gzip.decompress(packed).decode())


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
