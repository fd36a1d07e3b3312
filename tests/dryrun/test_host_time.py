"""The host's time follows from what it did, and scales with the host."""

import pytest

from refshard.dryrun.price import CHUNK_CAT_ENTRY_S, COSTS, PER_KERNEL_S, host_seconds
from refshard.dryrun.recording import Flag
from tests.dryrun.made import Made


def test_each_event_takes_what_the_host_did_since_the_one_before() -> None:
    made = Made()
    group = made.group([0, 1])
    made.launch(host_operators=3, host_dispatched=2, host_nodes=1, host_calls=10)
    made.launch("aten::record_stream", flags=Flag.HOST_ONLY, host_operators=1)
    made.collective("all_reduce", group, nbytes=8, stream=1)
    made.wait(1, made.record(0))
    made.allocate(512)
    made.mark()
    c = COSTS
    work = c.launch_s + 3 * c.operator_s + 2 * c.dispatched_s + c.node_s + 10 * c.call_s
    expected = [work, c.operator_s, c.launch_s, c.event_s, c.event_s, 0, 0]
    assert host_seconds(made.recording(), PER_KERNEL_S).tolist() == pytest.approx(expected)


def test_a_host_twice_as_fast_needs_half() -> None:
    made = Made()
    made.launch(host_calls=7)
    slow, fast = (host_seconds(made.recording(), host_s)[0] for host_s in (PER_KERNEL_S, PER_KERNEL_S / 2))
    assert slow == pytest.approx(2 * fast)


def test_fsdp2s_copy_of_gradients_takes_the_host_time_by_size() -> None:
    made = Made()
    made.launch("aten::_chunk_cat", signature="bf16[4096,4096] bf16[4096] fp32[8,2048000]")
    made.launch("aten::_chunk_cat", signature="bf16[4096,4096] bf16[4096] -> fp32[8,2048000]")
    made.launch("aten::cat", signature="bf16[4096,4096] bf16[4096] -> fp32[8,2048000]")
    entries = 2048000 * 4 / 2048
    table = CHUNK_CAT_ENTRY_S * entries
    expected = [COSTS.launch_s + table, COSTS.launch_s + table, COSTS.launch_s]
    assert host_seconds(made.recording(), PER_KERNEL_S).tolist() == pytest.approx(expected)
