"""``refshard validate``: predictions beside what was measured or published."""

import json
from pathlib import Path

from refshard.errors import SpecError
from refshard.report.published_table import as_objects, terminal_published
from refshard.simulate.published import predict
from refshard.specs.published import load_published


def validate(run: Path | None, *, as_json: bool) -> str:
    """Predictions beside the measured cases of a run, or without one beside every published table; the text to print.

    Raises:
        StoreError: there is no run in the folder, or it is damaged.
        SpecError: the run holds no case both as measured and as emulated or simulated.
    """
    if run is not None:
        return _of_run(run, as_json=as_json)
    tables = {name: (table, predict(table)) for name, table in load_published().items()}
    return json.dumps(as_objects(tables), indent=2) if as_json else terminal_published(tables)


def _of_run(folder: Path, *, as_json: bool) -> str:
    from refshard.harness.store import read_run  # these bring torch and pandas
    from refshard.report import validation
    from refshard.report.evidence import gather

    pairs = validation.validated(gather(read_run(folder)))
    if not pairs:
        raise SpecError(
            f"{folder}: holds no case that was measured and predicted too; run a suite whose fidelity lists 'measured' "
            "beside 'emulated' or 'simulated'"
        )
    return json.dumps(validation.as_objects(pairs), indent=2) if as_json else validation.terminal_validation(pairs)
