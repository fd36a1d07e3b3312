"""Tables of the docs that are made from ``profiles/recorded`` and ``validation``: lines of Markdown."""
