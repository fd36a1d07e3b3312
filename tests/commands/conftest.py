"""Settings of the tests of commands."""

import logging
from collections.abc import Iterator

import pytest

from refshard.commands.printing import LOG


@pytest.fixture(autouse=True)
def _as_talkative_as_before() -> Iterator[None]:
    """What ``--quiet`` or ``--verbose`` of a test set does not outlast it."""
    yield
    LOG.setLevel(logging.INFO)
