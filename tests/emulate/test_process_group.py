"""The backend as torch.distributed shows it: every collective by its old and its new name, groups, costs, ends."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import AllgatherOptions, HashStore, ReduceScatterOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

from refshard.costs import collective_cost, group_shape
from refshard.emulate.process_group import EmulatedGroup, emulated_world
from refshard.emulate.world import EmulatedWorld
from refshard.engine.collectives import GroupCollectives, library_of
from refshard.errors import SpecError
from refshard.specs.cluster import MeasuredCollective
from tests.emulate import FAST, FakeClock, make_cluster

# torch 2.13 deprecates names that 2.11 has no other for.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")

WORLD, RANK, NUMEL = 8, 5, 3
CPU = torch.device("cpu")
OWN = [1.0, 2.0, 3.0]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Rank 5 of 8 on two nodes."""
    with emulated_world(EmulatedWorld(make_cluster(**FAST), rank=RANK, world_size=WORLD)) as made:
        yield made


def own() -> torch.Tensor:
    return torch.tensor(OWN)


def full() -> torch.Tensor:
    return torch.arange(float(WORLD * NUMEL))


SUMS = full().view(WORLD, NUMEL).sum(0).tolist()


def gathered(call: Callable[..., Any]) -> list[float]:
    output = torch.zeros(WORLD * NUMEL)
    call(output, own())
    return output.tolist()


def reduced(call: Callable[..., Any]) -> list[float]:
    output = torch.zeros(NUMEL)
    call(output, full())
    return output.tolist()


@pytest.mark.parametrize("name", ["all_gather_single", "_allgather_base"])
def test_flat_gathers_by_either_name(group: dist.ProcessGroup, name: str) -> None:
    options = AllgatherOptions()
    assert gathered(lambda output, given: getattr(group, name)(output, given, options).wait()) == OWN * WORLD


@pytest.mark.parametrize("name", ["reduce_scatter_single", "_reduce_scatter_base"])
def test_flat_reduce_scatters_by_either_name(group: dist.ProcessGroup, name: str) -> None:
    options = ReduceScatterOptions()
    assert reduced(lambda output, given: getattr(group, name)(output, given, options).wait()) == SUMS


def test_every_public_collective_leaves_what_is_documented(group: dist.ProcessGroup) -> None:
    gathered_list = [torch.zeros(NUMEL) for _ in range(WORLD)]
    dist.all_gather(gathered_list, own())
    assert torch.cat(gathered_list).tolist() == OWN * WORLD
    scattered = torch.zeros(NUMEL)
    dist.reduce_scatter(scattered, list(full().split(NUMEL)))
    assert scattered.tolist() == SUMS
    exchanged = torch.zeros(WORLD * NUMEL)
    dist.all_to_all_single(exchanged, full())
    assert torch.equal(exchanged, full())
    dist.all_to_all(gathered_list, list(full().split(NUMEL)))
    assert torch.equal(torch.cat(gathered_list), full())
    for op, factor in ((dist.ReduceOp.SUM, WORLD), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1)):
        tensor = own()
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == [factor * x for x in OWN]
    for tensor, call in ((own(), lambda t: dist.broadcast(t, src=0)), (own(), lambda t: dist.reduce(t, dst=0))):
        call(tensor)
        assert tensor.tolist() == OWN
    at_root = own()
    dist.reduce(at_root, dst=RANK)
    assert at_root.tolist() == [WORLD * x for x in OWN]
    dist.gather(own(), gathered_list, dst=RANK)
    assert torch.cat(gathered_list).tolist() == OWN * WORLD
    dist.gather(own(), dst=0)
    dist.scatter(scattered, list(full().split(NUMEL)), src=RANK)
    assert scattered.tolist() == full()[RANK * NUMEL : (RANK + 1) * NUMEL].tolist()
    for receive in (lambda t: dist.scatter(t, src=0), lambda t: dist.recv(t, src=0)):
        unknown = torch.zeros(100)
        receive(unknown)
        assert bool((unknown != 0).all())
    dist.send(own(), dst=0)
    dist.barrier()


def test_objects_are_gathered_and_broadcast_from_here(group: dist.ProcessGroup) -> None:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": RANK}] * WORLD
    sent = ["a", 1]
    dist.broadcast_object_list(sent, src=RANK)
    assert sent == ["a", 1]


def test_functional_collectives_and_their_coalesced_forms(group: dist.ProcessGroup) -> None:
    gather = funcol.all_gather_tensor(own(), 0, group)
    scatter = funcol.reduce_scatter_tensor(full(), "avg", 0, group)
    summed = funcol.all_reduce(own(), "sum", group)
    assert funcol.wait_tensor(gather).tolist() == OWN * WORLD
    assert funcol.wait_tensor(scatter).tolist() == [x / WORLD for x in SUMS]
    assert funcol.wait_tensor(summed).tolist() == [WORLD * x for x in OWN]
    gathers = funcol.all_gather_into_tensor_coalesced([own(), own()[:1]], group)
    scatters = funcol.reduce_scatter_tensor_coalesced([full(), full()], "sum", [0, 0], group)
    sums = funcol.all_reduce_coalesced([own(), own()], "sum", group)
    assert [funcol.wait_tensor(t).tolist() for t in gathers] == [OWN * WORLD, OWN[:1] * WORLD]
    assert [funcol.wait_tensor(t).tolist() for t in scatters] == [SUMS] * 2
    assert [funcol.wait_tensor(t).tolist() for t in sums] == [[WORLD * x for x in OWN]] * 2
    exchanged = funcol.all_to_all_single(full(), None, None, group)
    assert torch.equal(funcol.wait_tensor(exchanged), full())


def test_coalescing_in_a_context(group: dist.ProcessGroup) -> None:
    tensors = [own(), own()]
    with _coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert [t.tolist() for t in tensors] == [[WORLD * x for x in OWN]] * 2


def test_handles_and_futures(group: dist.ProcessGroup) -> None:
    tensor = own()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    (found,) = work.get_future().wait()
    assert found is tensor
    assert work.is_completed()
    assert work.wait()
    assert tensor.tolist() == [WORLD * x for x in OWN]


def test_groups_of_any_ranks_and_a_mesh_of_two_axes(group: dist.ProcessGroup) -> None:
    odd = dist.new_group([1, 3, 5])
    assert (odd.rank(), odd.size(), dist.get_process_group_ranks(odd)) == (2, 3, [1, 3, 5])
    assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    shards, replicas = mesh.get_group("shard"), mesh.get_group("replicate")
    assert (shards.rank(), dist.get_process_group_ranks(shards)) == (1, [4, 5, 6, 7])
    assert (replicas.rank(), dist.get_process_group_ranks(replicas)) == (1, [1, 5])
    tensor = own()
    dist.all_reduce(tensor, group=replicas)
    assert tensor.tolist() == [2 * x for x in OWN]
    assert len({g.group_name for g in (group, odd, shards, replicas)}) == 4


@pytest.mark.parametrize(("library", "plays"), [("nccl", "nccl"), ("rccl", "nccl"), ("gloo", "gloo")])
def test_a_group_plays_the_library_of_its_cluster(library: str, plays: str) -> None:
    with emulated_world(EmulatedWorld(make_cluster(library, **FAST), rank=0, world_size=2)) as group:
        assert dist.get_backend(group) == "emulated"
        for served in (group, dist.new_group([0, 1])):
            assert library_of(served, CPU) == plays
        collectives = GroupCollectives(group)
        output, full = torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.profiler.profile(record_shapes=True) as profile:
            collectives.all_gather(output, full[:2]).wait()
            collectives.reduce_scatter(output[:2], full * collectives.scale).wait()
        issued = {e.name for e in profile.events() if e.name.startswith("c10d::")}
    flat = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}
    assert issued == ({"c10d::alltoall_base_"} if plays == "gloo" else flat)
    assert output.tolist() == [2.0, 3.0, 1.0, 2.0], "the mean over ranks that are all alike"


class Gate(FakeClock):
    """A clock of which no sleep ends before ``opened``."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def sleep_until(self, moment_ns: int, waking: threading.Event) -> None:
        self.opened.wait(5)
        super().sleep_until(moment_ns, waking)


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_on_a_cpu_the_engine_goes_on_while_a_collective_is_under_way(library: str) -> None:
    clock = Gate()
    with emulated_world(EmulatedWorld(make_cluster(library), rank=0, world_size=2, clock=clock)) as group:
        collectives, output = GroupCollectives(group), torch.zeros(4)
        pending = collectives.all_gather(output, torch.ones(2))
        assert output.tolist()[2:] == [0.0, 0.0]
        clock.opened.set()
        pending.wait()
        assert output.tolist() == [1.0] * 4


def ends(issue: Callable[[], Any], *, library: str = "nccl", world_size: int = WORLD) -> list[int]:
    """When, on a clock that stands still otherwise, each collective that is issued would end (ns)."""
    clock = FakeClock()
    with emulated_world(EmulatedWorld(make_cluster(library), rank=0, world_size=world_size, clock=clock)):
        issue()
        return clock.slept[1::2]


def test_collectives_take_what_the_cost_model_says_of_the_unsharded_tensor() -> None:
    cluster = make_cluster().of_world_size(WORLD)
    shape, node = group_shape(cluster, range(WORLD)), group_shape(cluster, range(4))
    half = torch.empty(250)

    def cost(op: Any, nbytes: int, of: Any = shape) -> int:
        return round(collective_cost(cluster, op, nbytes, of).seconds * 1e9)

    def issue() -> None:
        node_group = dist.new_group(range(4))
        dist.all_reduce(half)
        dist.reduce_scatter_tensor(torch.empty(10), torch.empty(80))
        dist.broadcast(half, src=0)
        dist.all_to_all_single(torch.empty(80), torch.empty(80))
        dist.all_to_all_single(torch.empty(7), torch.empty(7), [0] + [1] * 7, [0] + [1] * 7)
        dist.all_reduce(half, group=node_group)

    found = ends(issue)
    took = [end - before for before, end in zip([0, *found], found)]
    assert took[:5] == [
        cost("all_reduce", 1000), cost("reduce_scatter", 320), cost("broadcast", 1000), cost("all_to_all", 320),
        cost("all_to_all", 32),
    ]  # fmt: skip
    assert took[5] == cost("all_reduce", 1000, node)


def test_the_pieces_of_an_exchange_take_together_what_the_whole_was_measured_to_take() -> None:
    """Three of 1000 bytes each, of 6000 in all on two ranks: the first takes 200 us and a latency of 100, others 100.

    One that is issued when all have ended is an exchange of its own.
    """
    points = {1: 1e-4, 2000: 3e-4, 6000: 5e-4}
    measured = tuple(
        MeasuredCollective(op="exchange", ranks=2, nodes=1, bytes=nbytes, seconds=seconds)
        for nbytes, seconds in points.items()
    )
    clock = Gate()
    world = EmulatedWorld(make_cluster("gloo", measured=measured), rank=0, world_size=2, clock=clock)

    def piece() -> Any:
        return dist.all_to_all_single(torch.ones(250), torch.ones(250), [0, 250], [0, 250], async_op=True)

    with emulated_world(world):
        pieces = [piece() for _ in range(3)]
        clock.opened.set()
        for work in pieces:
            work.wait()
        piece().wait()
    starts_and_ends = [(0, 300), (200, 400), (300, 500), (500, 800)]
    assert sorted(round(moment / 1000) for moment in clock.slept) == sorted(sum(starts_and_ends, ()))


def test_a_barrier_is_where_processes_of_one_world_meet() -> None:
    met = threading.Event()
    world = EmulatedWorld(make_cluster(**FAST), rank=0, world_size=WORLD, meet=met.set)
    with emulated_world(world) as group:
        dist.barrier(dist.new_group([0, 1]))
        assert not met.is_set()
        dist.barrier(group)
        assert met.is_set()


def test_the_end_of_a_group_ends_its_threads_and_its_use() -> None:
    world = EmulatedWorld(make_cluster(**FAST), rank=0, world_size=WORLD)
    with emulated_world(world) as group:
        other = dist.new_group([0, 1])
        for each in (group, other):
            dist.all_reduce(own(), group=each)
        running = [t for t in threading.enumerate() if t.name.startswith("emulated")]
        assert len(running) == 2
        dist.destroy_process_group(other)
        assert sum(t.is_alive() for t in running) == 1
    assert not any(t.is_alive() for t in running)
    assert not dist.is_initialized()


def test_a_world_of_256_is_made_in_one_process() -> None:
    with emulated_world(EmulatedWorld(make_cluster(**FAST), rank=255, world_size=256)) as group:
        mesh = init_device_mesh("cpu", (64, 4))
        assert (group.rank(), mesh.get_group(1).rank(), mesh.get_group(0).rank()) == (255, 3, 63)
        output = torch.zeros(256)
        dist.all_gather_into_tensor(output, torch.ones(1))
        assert output.tolist() == [1.0] * 256


def test_what_outlasted_its_time_is_remarked_on() -> None:
    """A clock that ticks 3 us between the issue and the end of what should take 2 us, and 12 us."""
    with emulated_world(world := EmulatedWorld(make_cluster(), rank=0, world_size=2, clock=FakeClock(3000))):
        dist.all_reduce(torch.ones(3000))
        assert world.remark() == ""
        dist.all_reduce(torch.ones(500))
        assert world.remark() == (
            "local copies took longer than the modelled network in 1 of 2 collectives, by 1.00 us in total"
        )


def test_ranks_that_fill_no_node_are_refused() -> None:
    with pytest.raises(SpecError, match="on nodes of 4 ranks, got 6"):
        EmulatedWorld(make_cluster(), rank=0, world_size=6)


def test_the_backend_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="needs an EmulatedWorld as pg_options, got none"):
        dist.init_process_group("emulated", store=HashStore(), rank=0, world_size=2)
    assert not dist.is_initialized()
    assert issubclass(EmulatedGroup, dist.ProcessGroup)
