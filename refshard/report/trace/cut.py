"""Names that are too long for a table or a sentence."""


def cut(name: str, most: int) -> str:
    """At most so many characters: the first ones, and a sign that there are more.

    >>> cut("aten::copy_", 11), cut("aten::copy_", 6)
    ('aten::copy_', 'aten:…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def cut_middle(name: str, most: int) -> str:
    """At most so many characters: the first and the last ones.

    >>> cut_middle("aten::copy_", 11), cut_middle("aten::copy_", 6)
    ('aten::copy_', 'ate…y_')
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"
