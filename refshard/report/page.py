"""An answer as one HTML file that needs nothing else: it opens from disk and asks the network for nothing.

Names of modules and kernels, lines of scripts and errors come from outside: Jinja2 escapes them in the page, ``tojson``
in its data, and the page's content security policy runs no script but its own.
"""

from collections.abc import Iterable

from refshard.report.blocks import Answer, Section, Verdict, cell_text
from refshard.report.draw.charts import theme
from refshard.report.draw.render import fill, resource, script


def as_page(answer: Answer, *, product: str, command: str) -> Iterable[str]:
    """The HTML in pieces, in order. ``product`` is the command that answers, ``command`` the line that made the page.

    The verdict comes first, with all blocks before the first section.
    """
    assert answer.cover is not None
    blocks = [block for block in answer.blocks if block.where != "terminal"]
    sections = [block for block in blocks if isinstance(block, Section)]
    content = {
        "title": answer.cover.title,
        "cover": answer.cover,
        "product_name": product,
        "lead": [sentence for block in blocks if isinstance(block, Verdict) for sentence in block.sentences],
        "first": [block for block in blocks if not isinstance(block, (Verdict, Section))],
        "sections": sections,
        "text_of": cell_text,
        "command": command,
        "data": {"theme": theme()},
    }
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js", "perfetto.js")]
    return fill("page.html.j2", content, style=resource("style.css"), scripts=scripts)
