"""A cluster: its accelerators, how they are joined, and the collectives that its library runs over that."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import msgspec

from refshard import resources
from refshard.errors import SpecError
from refshard.specs.hardware import HardwareSpec, load_hardware
from refshard.specs.names import closest, is_alias, profile_called
from refshard.specs.reading import convert, finite, read_toml, sourced, within

Library = Literal["nccl", "rccl", "gloo"]
Algorithm = Literal["ring", "tree", "hierarchical"]
_BESIDE = ("compute_beside_communication", "communication_beside_compute", "preparation_beside_compute")
CollectiveOp = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "exchange"]
"""``exchange`` is the engine's over gloo: an all-to-all in pieces, each rank's part straight to each other rank."""
_UNSOURCED = ("hardware", "library", "nodes", "algorithms", "measured", "not_measured", "about", "sources")
COLLECTIVES: tuple[CollectiveOp, ...] = get_args(CollectiveOp)


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins ranks.

    ``bytes_per_s`` is the bus bandwidth that large collectives reach, in nccl-tests' sense: within a node per rank,
    between nodes per *node*, all its adapters together, in one direction. ``latency_s`` is that of one hop.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        finite("bytes_per_s", self.bytes_per_s, above=0)
        finite("latency_s", self.latency_s)


class QuickProtocol(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A protocol that trades bandwidth for latency, NCCL's LL128: the library takes it where it is faster.

    ``part`` is what it reaches of a link's ``bytes_per_s``. The other fields replace those of the links and the
    cluster, in seconds.
    """

    part: float
    within_latency_s: float
    between_latency_s: float
    launch_s: float

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise ValueError(f"part must lie in (0, 1], got {self.part}")
        for field in ("within_latency_s", "between_latency_s", "launch_s"):
            finite(field, getattr(self, field))


class MeasuredCollective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective as it was measured over the real library: ``bytes`` of the unsharded tensor, median ``seconds``."""

    op: CollectiveOp
    ranks: int
    nodes: int
    bytes: int
    seconds: float

    def __post_init__(self) -> None:
        within("ranks", self.ranks, 2)
        within("nodes", self.nodes, 1, most=self.ranks)
        within("bytes", self.bytes, 1)
        finite("seconds", self.seconds, above=0)


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of ``ranks_per_node`` ranks each. ``sources`` says of each field where its value comes from.

    ``hardware`` names a profile, or is one. ``between`` is None where there is but one node. ``launch_s`` is what a
    collective takes however little it moves, ``quick`` the library's other protocol, if it has one. While one overlaps
    compute, compute runs at ``compute_beside_communication`` of its rate (the collective's kernels hold
    multiprocessors; on a CPU its threads hold cores) and the collective at ``communication_beside_compute`` of its own.
    Kernels that prepare a reduction during compute get ``preparation_beside_compute`` of the device, and compute the
    rest (YaFSDP's give-way effect). With each doubling of the nodes a step takes longer by the part ``straggling`` of
    itself, for the slowest of more ranks. ``host_memory_bytes`` are those of a node's memory, and
    ``host_memory_bytes_per_s`` what all its cores together reach of it; 0 if not known. ``measured`` are collectives
    timed on this very cluster, which go before what ``within`` and ``between`` would say. ``not_measured`` names the
    pieces that a calibration could not measure, and why.
    """

    hardware: str | HardwareSpec
    library: Library
    ranks_per_node: int
    nodes: int = 1
    within: LinkSpec
    between: LinkSpec | None = None
    algorithms: tuple[Algorithm, ...] = ("ring",)
    launch_s: float = 0.0
    quick: QuickProtocol | None = None
    compute_beside_communication: float = 1.0
    communication_beside_compute: float = 1.0
    preparation_beside_compute: float = 0.5
    straggling: float = 0.0
    host_memory_bytes: int = 0
    host_memory_bytes_per_s: float = 0.0
    measured: tuple[MeasuredCollective, ...] = ()
    not_measured: dict[str, str] = {}
    about: str = ""
    sources: dict[str, str]

    def __post_init__(self) -> None:
        within("ranks_per_node", self.ranks_per_node, 1)
        within("nodes", self.nodes, 1)
        if self.nodes > 1 and self.between is None:
            raise ValueError(f"between must link the {self.nodes} nodes, got none; add the table [between]")
        if "ring" not in self.algorithms:
            raise ValueError(f"algorithms must hold 'ring', which runs every collective, got {list(self.algorithms)}")
        for field in _BESIDE:
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field} must lie in (0, 1], got {getattr(self, field)}")
        if self.preparation_beside_compute == 1:
            raise ValueError("preparation_beside_compute must be < 1, since compute gets the rest, got 1")
        finite("launch_s", self.launch_s)
        finite("straggling", self.straggling)
        sourced(self, exempt=_UNSOURCED)

    @property
    def accelerator(self) -> HardwareSpec:
        """What each rank computes on.

        Raises:
            SpecError: the profile that is named does not exist.
        """
        return load_hardware(self.hardware) if isinstance(self.hardware, str) else self.hardware

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def of_world_size(self, world_size: int) -> "ClusterSpec":
        """As many of these nodes as ``world_size`` ranks fill; a part of one where they are fewer than it has.

        Raises:
            SpecError: they would fill the last node in part, or nothing joins the nodes.
        """
        if world_size <= self.ranks_per_node:
            return msgspec.structs.replace(self, nodes=1, ranks_per_node=world_size)
        nodes, rest = divmod(world_size, self.ranks_per_node)
        if rest:
            raise SpecError(
                f"gpus: must be at most {self.ranks_per_node}, or a multiple of it, on nodes of "
                f"{self.ranks_per_node} ranks, got {world_size}; change either"
            )
        return self.of_nodes(nodes)

    def of_nodes(self, nodes: int) -> "ClusterSpec":
        """This cluster with as many nodes.

        Raises:
            SpecError: nothing joins the nodes.
        """
        if nodes > 1 and self.between is None:
            raise SpecError(f"cluster: {nodes} nodes need the table [between], which the profile lacks; add it")
        within("nodes", nodes, 1)
        return msgspec.structs.replace(self, nodes=nodes)


def load_cluster(given: str) -> ClusterSpec:
    """The cluster called ``given``: a TOML file or a profile, by its name, an alias or another spelling of either.

    ``xN`` after it is N nodes. ``Kx`` before it is K GPUs: full nodes, or a part of one.

    Raises:
        SpecError: unknown cluster, its profile breaks the schema, or it has no such part.
    """
    return _find(given)[1]


def cluster_name(given: str) -> str:
    """The name of the cluster called ``given`` in which all spellings are equal; unknown names are their own.

    >>> cluster_name("8xH100"), cluster_name("16xh100"), cluster_name("4x H100"), cluster_name("none")
    ('dgx-h100', 'dgx-h100x2', '4xdgx-h100', 'none')
    """
    try:
        return _find(given)[0]
    except SpecError:
        return given


def with_nodes(name: str, nodes: int) -> str:
    """The name of a cluster with as many nodes; ``name`` is as :func:`cluster_name` gives it."""
    base = name if _profile(name) else re.sub(r"x\d{1,7}$", "", name)
    return f"{base}x{nodes}"


def _find(given: str) -> tuple[str, ClusterSpec]:
    """The cluster called ``given``, with its name."""
    gpus, base, nodes = next(_readings(given), (None, given, None))
    if (found := _profile(base)) is None:
        parts = re.fullmatch(r"(\d{1,7})?(?: ?x ?)?(.*?)(x\d{1,7})?", given, re.IGNORECASE | re.DOTALL)
        before, middle, after = parts.groups("") if parts else ("", given, "")
        pieces = (middle, f"{before}x{{}}{after}" if before else f"{{}}{after}"), (given, "{}")
        remedy = closest("clusters", pieces, resources.cluster_profiles())
        raise SpecError(
            f"cluster: no profile and no file '{given[:80]}'; {remedy} (8xh100 has 8 GPUs, dgx-h100x4 4 nodes)"
        )
    name, path = found
    if nodes is not None and is_alias("clusters", base):
        raise SpecError(
            f"cluster: '{given}' may mean {nodes} GPUs or {nodes} nodes; write {nodes}x{base} or {name}x{nodes}"
        )
    if 0 in (gpus, nodes):
        raise SpecError(f"cluster: must have at least one node and one GPU, got '{given}'; write 1 or more")
    cluster = whole = convert(read_toml(path), ClusterSpec, where=f"cluster {name}")
    whole.accelerator  # noqa: B018  a profile that names no hardware is refused here
    if gpus is not None:
        cluster = whole.of_world_size(gpus)
        name = f"{gpus}x{name}" if gpus < whole.ranks_per_node else name
    if nodes is not None:
        cluster = cluster.of_nodes(nodes)
    if gpus is not None and gpus not in (cluster.ranks_per_node, cluster.world_size):
        raise SpecError(f"cluster: '{given}' has {cluster.world_size} GPUs, not {gpus}; leave one of the numbers out")
    return name if cluster.nodes == whole.nodes else f"{name}x{cluster.nodes}", cluster


def _readings(given: str) -> Iterator[tuple[int | None, str, int | None]]:
    """What ``given`` may mean, first the most literal: GPUs, the name of a cluster that is known, nodes."""
    for pattern in (r"()(.+)()", r"(\d{1,7}) ?x ?(.+)()", r"()(.+)x(\d{1,7})", r"(\d{1,7}) ?x ?(.+)x(\d{1,7})"):
        read = re.fullmatch(pattern, given, re.IGNORECASE)
        if read and _profile(read[2]):
            yield int(read[1]) if read[1] else None, read[2], int(read[3]) if read[3] else None


def _profile(name: str) -> tuple[str, Path] | None:
    """The name and the file of the profile, or of the user's file, called ``name``."""
    profiles = resources.cluster_profiles()
    if name not in profiles and _is_file(name):
        return name, Path(name)
    known = name if name in profiles else profile_called("clusters", name, profiles)
    return None if known is None else (known, profiles[known])


def cluster_of_device(device_name: str) -> str:
    """The first profile, by name, of a cluster whose GPUs are what torch.cuda calls ``device_name``.

    Raises:
        SpecError: no profile matches.
    """
    for name in sorted(resources.cluster_profiles()):
        hardware = load_cluster(name).accelerator
        if device_name in (hardware.device_name, *hardware.also_named):
            return name
    raise SpecError(
        f"cluster: no profile has the GPU '{device_name}'; choose a profile or your own file with "
        "--dry-run-first (docs/how-to/machines.md)"
    )


def _is_file(name: str) -> bool:
    """Whether there is a file of this name; False for an impossible file name."""
    try:
        return Path(name).is_file()
    except OSError:
        return False
