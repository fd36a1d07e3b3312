"""Text from elsewhere, such as a log or the names in a trace, for people."""

import re

_TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def plain(text: str) -> str:
    """Without colours and other codes that a terminal or a page would act on; tabs become spaces."""
    uncoloured = _TERMINAL_ESCAPE.sub("", text).replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in uncoloured)
