"""How near a step comes to the shortest that its compute and its traffic allow.

Three things take their time whatever the schedule, and a step takes at least the longest of them:

- compute alone: the step of the unsharded reference, which has the whole batch, over the world size;
- the wire: what the announced collectives move between hosts, at the rate of the link. Its directions carry different
  bytes at once, so each counts by itself, and both carry the same. Ranks of one host need not cross the link to reach
  each other: of a tensor of S bytes that is gathered or reduce-scattered over H hosts, at least S (H - 1) / H pass each
  host's link each way, and twice that if it is all-reduced;
- the critical path of training: compute, and before and after it the token embedding on the wire. It is used first and
  its gradient is made last, so whatever the grouping, it is gathered before and reduce-scattered after all compute, or
  all-reduced after it, which moves as much.

What is left out only makes the bound smaller: headers, latency, what else shares a unit or a bucket with the embedding,
recomputed activations, an optimizer step that the ranks do not share out.
"""

from collections.abc import Sequence

from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.specs.model import ModelSpec
from refshard.specs.suite import NetworkSpec

_ELEMENT_BYTES = 4  # every strategy gathers and reduces in fp32


def overlap_efficiency(step_time_s: float, bound_s: float | None) -> float | None:
    """Lower bound over step time; None where there is no bound."""
    return bound_s / step_time_s if bound_s else None


def lower_bound(
    case: Case,
    model: ModelSpec,
    issued: Sequence[CollectiveCount],
    reference_step_time_s: float,
    network: NetworkSpec,
) -> float | None:
    """Seconds that a step of ``case`` takes at least; None for one that communicates nothing, and with Muon for
    one that has all-to-alls: how much of them stays on its rank, the announced bytes do not say.

    Args:
        case: the case, of more than one rank.
        model: what it trains.
        issued: the collectives of one step and rank.
        reference_step_time_s: step time of ``case.reference()``.
        network: what joins the hosts.
    """
    job = case.job
    if job.gpus == 1 or not issued:
        return None
    if job.optimizer == "muon" and any(count.op == "all_to_all" for count in issued):
        return None
    bytes_per_s = network.bits_per_s / 8
    compute = reference_step_time_s / job.gpus
    wire = link_bytes(issued, job.gpus, network.hosts) / bytes_per_s
    return max(wire, compute + _path_bytes(case, model, network.hosts) / bytes_per_s)


def link_bytes(issued: Sequence[CollectiveCount], world_size: int, hosts: int) -> float:
    """Bytes that must pass a host's link each way, for these collectives of one step and rank.

    All bytes of an exchange go to other ranks; a collective has a part in ``world_size`` that goes nowhere.
    """
    sizes = {count.op: count.bytes for count in issued}
    exchanged = sizes.get("all_to_all", 0) * world_size / (world_size - 1)
    whole = sizes.get("all_gather", 0) + sizes.get("reduce_scatter", 0) + exchanged + 2 * sizes.get("all_reduce", 0)
    return whole * (hosts - 1) / hosts


def _path_bytes(case: Case, model: ModelSpec, hosts: int) -> float:
    """Bytes that pass a link each way while no compute can run; of inference none, whose first unit may be kept."""
    if case.job.workload == "inference":
        return 0
    return 2 * model.vocab * model.dim * _ELEMENT_BYTES * (hosts - 1) / hosts
