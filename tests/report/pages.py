"""Pages as a browser would take them apart."""

import base64
import hashlib
from html.parser import HTMLParser
from typing import Any

import numpy as np


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, the text, and apart from it scripts and the style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.style = ""
        self.text = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See :class:`HTMLParser`."""
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        """See :class:`HTMLParser`; tags that need no end are closed by the next one outside them."""
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """See :class:`HTMLParser`."""
        if self._inside and self._inside[-1] == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self._inside and self._inside[-1] == "style":
            self.style += data
        else:
            self.text += data

    def having(self, name: str) -> list[dict[str, str | None]]:
        """Attributes of every tag of this name."""
        return [attributes for tag, attributes in self.tags if tag == name]

    @property
    def policy(self) -> str:
        """The content security policy."""
        (found,) = [m["content"] for m in self.having("meta") if m.get("http-equiv") == "Content-Security-Policy"]
        assert found is not None
        return found

    def allows(self, script: str) -> bool:
        """Whether the policy lets this script run."""
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return f"'sha256-{digest}'" in self.policy


def numbers(values: Any) -> list[float]:
    """An array of a figure's JSON, where plotly packs what came from numpy."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()  # type: ignore[no-any-return]
    return list(values)
