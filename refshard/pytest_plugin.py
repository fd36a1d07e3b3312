"""A fixture for tests of models: ``assert dry_run(build, batch, cluster="dgx-h100").fits``."""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def dry_run() -> "Callable[..., object]":
    """:func:`refshard.dry_run`; the test is skipped where the fake device cannot be built."""
    from refshard.dryrun.factory import dry_run as run
    from refshard.errors import RefshardError
    from refshard.fakecuda.build import extension

    try:
        extension()
    except RefshardError as error:
        pytest.skip(str(error))
    return run
