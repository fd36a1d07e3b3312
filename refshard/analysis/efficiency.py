"""The shortest that a step can take, given its compute and its traffic.

Three things take their time under any schedule, and a step takes at least the longest of them:

- compute alone: the step of the unsharded reference, which has the whole batch, over the world size;
- the wire: what the announced collectives move between hosts, at the rate of the link. Its directions carry different
  bytes at once, so each counts by itself, and both carry the same. Ranks of one host need not cross the link to reach
  each other: of a tensor of S bytes that is gathered or reduce-scattered over H hosts, at least S (H - 1) / H pass each
  host's link each way, and twice that if it is all-reduced;
- the critical path of training: compute, and before and after it the token embedding on the wire. It is used first and
  its gradient is made last, so with any grouping it is gathered before and reduce-scattered after all compute, or
  all-reduced after it, which moves as much.

What this leaves out makes the bound smaller, never larger: headers, latency, parameters that share a unit or a bucket
with the embedding, recomputed activations, an optimizer step that is not sharded.
"""

from collections.abc import Sequence

from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.specs.job import WHOLE_MATRICES
from refshard.specs.model import ModelSpec
from refshard.specs.suite import NetworkSpec

_ELEMENT_BYTES = 4  # every strategy gathers and reduces in fp32


def lower_bound(
    case: Case, model: ModelSpec, issued: Sequence[CollectiveCount], reference_step_time_s: float,
    network: NetworkSpec,
) -> float | None:  # fmt: skip
    """The shortest that a step of ``case`` can take, s; None if it communicates nothing, or uses all-to-alls with
    an optimizer of whole matrices: the announced bytes do not say how much of them stays on its rank.

    ``issued`` are the collectives of one step and rank, ``reference_step_time_s`` is the step time of
    ``case.reference()``.
    """
    job = case.job
    if job.gpus == 1 or not issued:
        return None
    if job.optimizer in WHOLE_MATRICES and any(count.op == "all_to_all" for count in issued):
        return None
    bytes_per_s = network.bits_per_s / 8
    wire = link_bytes(issued, case.job.gpus, network.hosts) / bytes_per_s
    # Inference has no backward, and its first unit may be kept.
    embedding = 0 if case.job.workload == "inference" else model.vocab * model.dim * _ELEMENT_BYTES
    before_and_after = 2 * embedding * (network.hosts - 1) / network.hosts / bytes_per_s
    return max(wire, reference_step_time_s / case.job.gpus + before_and_after)


def link_bytes(issued: Sequence[CollectiveCount], world_size: int, hosts: int) -> float:
    """Bytes that must pass a host's link each way, for these collectives of one step and rank.

    An all-to-all sends all bytes to other ranks; other collectives keep one part in ``world_size``.
    """
    sizes = {count.op: count.bytes for count in issued}
    exchanged = sizes.get("all_to_all", 0) * world_size / (world_size - 1)
    whole = sizes.get("all_gather", 0) + sizes.get("reduce_scatter", 0) + exchanged + 2 * sizes.get("all_reduce", 0)
    return whole * (hosts - 1) / hosts
