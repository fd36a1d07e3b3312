"""``refshard validate``: predictions beside what was measured or published."""

import json

from refshard.report.published_table import as_objects, terminal_published
from refshard.simulate.published import predict
from refshard.specs.published import load_published


def published(*, as_json: bool) -> str:
    """Every published table beside its predictions; the text to print."""
    tables = {name: (table, predict(table)) for name, table in load_published().items()}
    return json.dumps(as_objects(tables), indent=2) if as_json else terminal_published(tables)
