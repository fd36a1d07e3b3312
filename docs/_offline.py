"""What a page would load from the network: the site must need nothing."""

import re
from html.parser import HTMLParser


class _Loads(HTMLParser):
    """Collects the addresses that a browser fetches by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        followed = {"a": "", "link": "" if given.get("rel") == "canonical" else "href"}.get(tag, "src")
        if re.match(r"(https?:)?//", given.get(followed, "")):
            self.found.append(given[followed])


def loads_from_network(html: str) -> list[str]:
    """Addresses outside the site that a page makes the browser fetch."""
    reader = _Loads()
    reader.feed(html)
    return reader.found
