"""Which Python functions of a trace are the user's, and that reading keeps no others."""

from pathlib import Path

import pytest

from refshard.events.reader import read_events
from refshard.events.table import is_own
from tests.analysis.handmade import event, write

OWN = (
    "train.py(12): step", "/home/me/project/train.py(12): step", "transformers/models/t5/modeling_t5.py(55): forward",
    "/opt/conda/lib/python3.10/site-packages/transformers/trainer.py(3): train",
    "torchvision/models/resnet.py(89): forward", "profile.py(1): main", "recopy.py(1): main",
    "my/torch/model.py(3): forward",
)  # fmt: skip
OTHERS = (
    "torch/cuda/__init__.py(975): synchronize",
    "/opt/conda/lib/python3.10/site-packages/torch/nn/modules/module.py(1): _call_impl",
    "/usr/local/lib/python3.12/dist-packages/torch/_tensor.py(3): backward",
    "/usr/lib/python3.12/contextlib.py(81): inner", "contextlib.py(81): inner", "multiprocessing/process.py(108): run",
    "triton/runtime/jit.py(3): run", "/tmp/torchinductor_me/dn/cdnigg.py(6894): partition_0",
    "<built-in method item of Tensor object at 0x7f0e871077c0>", "<string>(1): <module>", "<frozen os>(808): getenv",
    "nn.Module: Linear_0",
)  # fmt: skip


@pytest.mark.parametrize("name", [*OWN, *OTHERS])
def test_functions_are_the_users_or_others(name: str) -> None:
    assert is_own(name) == (name in OWN)


def test_the_reader_keeps_the_users_frames_with_their_times(tmp_path: Path) -> None:
    events = [
        event("train.py(1): main", 0, 100.5, cat="python_function"),
        event("nn.Module: GPT_0", 1, 50, cat="python_function"),
        event("<built-in method item of Tensor object at 0x1>", 2, 3, cat="python_function"),
        event("model.py(9): forward", 4.001, 5, cat="python_function", tid=2),
        event("train.py(1): main", 7, -1, cat="python_function"),
        event("aten::mm", 5, 1),
    ]
    trace = read_events(write(tmp_path / "t.json", events))
    frames, first = trace.frames, trace.frames.starts[0]
    assert first == trace.host.starts[0] - 5_000
    assert [frames.name_table[code] for code in frames.names] == ["train.py(1): main", "model.py(9): forward"]
    assert [(int(a - first), int(b - first)) for a, b in zip(frames.starts, frames.ends)] == [
        (0, 100_500),
        (4001, 9001),
    ]
    assert [trace.threads[thread] for thread in frames.threads] == [("7", "1"), ("7", "2")]
    assert trace.names == ("aten::mm",)
