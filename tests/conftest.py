"""Settings of all tests."""

import signal

import pytest
import torch
from hypothesis import settings

# A shell that starts a job in the background has it ignore Ctrl-C, and so whatever the job starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As the ranks have: sums then round alike here and there, and threads do not spin for each other on a busy machine.
torch.set_num_threads(1)

# A busy machine is no defect: tests assert values, never wall time.
settings.register_profile("refshard", deadline=None)
settings.load_profile("refshard")

LONG = ("slow", "full", "early")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that hold something long come first, so that none of them is what the others wait for at the end."""
    long = {item.path for item in items if any(map(item.get_closest_marker, LONG))}
    items.sort(key=lambda item: item.path not in long)
