"""What the host needs to ask for each event of a recording, from what it did since the event before.

The costs were fitted to host-bound steps on one machine (``python -m tests.gpu.quick.fit``;
``docs/explanation/gpu-validation.md`` has the errors). One number moves them to another machine: a profile's
``host_s``, which ``refshard calibrate`` measures as the host's time per kernel of a small decoder layer.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import HOST_COUNTS, Flag, Kind, Recording


class HostCosts(NamedTuple):
    """Seconds of the host by kind of work. What a call costs includes the code around it.

    - ``launch_s``: a kernel or a collective.
    - ``event_s``: an event that is recorded or waited for, and the switch of streams that comes with it.
    - ``operator_s``: a call of torch's dispatcher, also for a view.
    - ``dispatched_s``: in addition, if a Python dispatch mode is on, such as selective checkpointing's.
    - ``node_s``: an autograd node in backward.
    - ``call_s``: a call of a Python function.
    """

    launch_s: float
    event_s: float
    operator_s: float
    dispatched_s: float
    node_s: float
    call_s: float


PER_KERNEL_S = 4.2e-5
"""``host_s`` of the machine that :data:`COSTS` are of (``profiles/recorded/h200/calibration.toml``)."""
COSTS = HostCosts(
    launch_s=9.6e-6, event_s=1.47e-5, operator_s=2.46e-6, dispatched_s=2.83e-6, node_s=5.87e-6, call_s=8.2e-7
)


def host_seconds(recording: Recording, host_s: float) -> npt.NDArray[np.float64]:
    """Seconds by event, on a machine whose host needs ``host_s`` for a kernel of a small decoder layer."""
    seconds: npt.NDArray[np.float64] = host_work(recording) @ np.array(COSTS) * (host_s / PER_KERNEL_S)
    return seconds


def host_work(recording: Recording) -> npt.NDArray[np.float64]:
    """How often the host did what each field of :class:`HostCosts` prices: shape (events, fields)."""
    kinds = recording.kinds
    launches = np.isin(kinds, (Kind.LAUNCH, Kind.COLLECTIVE)) & (recording.flags & Flag.HOST_ONLY == 0)
    events = np.isin(kinds, (Kind.RECORD, Kind.WAIT))
    return np.column_stack((launches, events, *(getattr(recording, name) for name in HOST_COUNTS))).astype(np.float64)
