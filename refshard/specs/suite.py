"""A suite: matrices of cases, what launches them, and how often."""

import itertools
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.quantities import parse_count
from refshard.specs.case import KEYS, Case, check_keys
from refshard.specs.gate import GateSpec
from refshard.specs.job import REFERENCE_STRATEGY
from refshard.specs.reading import convert, is_count, parse_toml, read_as, read_toml, within

LauncherName = Literal["local", "netlab"]
MOST_ROUNDS = 1000
BATCH_KEYS = ("global_batch", "batch_per_rank", "microbatch")
"""Keys that give the batch, of which a case has one: sequences of a step over all ranks, of a step per rank, or of one
microbatch per rank."""
CASE_KEYS = tuple(dict.fromkeys((*KEYS, *BATCH_KEYS)))
FEWEST_DIGITS = 4
"""Fewest digits of a hash that names a case."""


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that the launcher ``netlab`` makes of one machine, and what each of them can send.

    ``rate`` is a whole number of ``mbit`` or ``gbit`` (10^6 or 10^9 bits per second), such as ``"2gbit"``.
    """

    hosts: int
    rate: str

    def __post_init__(self) -> None:
        within("hosts", self.hosts, 2, most=64)
        if not re.fullmatch(r"[1-9][0-9]{0,3}[mg]bit", self.rate):
            raise ValueError(
                f"rate must be a whole number from 1 to 9999 and 'mbit' or 'gbit', such as '2gbit', got {self.rate!r}"
            )

    @property
    def bits_per_s(self) -> int:
        """What each host can send, in bits per second."""
        return int(self.rate[:-4]) * {"m": 10**6, "g": 10**9}[self.rate[-4]]

    @property
    def description(self) -> str:
        """The network in words, for people."""
        unit = {"m": "Mbit/s", "g": "Gbit/s"}[self.rate[-4]]
        return f"{self.hosts} hosts joined at {self.rate[:-4]} {unit} (network namespaces)"

    def ranks_per_host(self, world_size: int) -> int:
        """How many ranks each host runs; a single rank runs on the first.

        Raises:
            SpecError: the ranks cannot be spread evenly.
        """
        if world_size > 1 and world_size % self.hosts:
            raise SpecError(
                f"gpus must be 1 or a multiple of network.hosts = {self.hosts}, got {world_size}; change either"
            )
        return max(world_size // self.hosts, 1)


class SuiteSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One or more matrices of cases.

    ``matrix`` is a table, or a list of tables. In each, lists are crossed with one another and any other value holds
    for all its cases; ``case`` holds what the cases of every table share, and a table's own values go before it. The
    keys are those of a case (:data:`~refshard.specs.case.KEYS`), and ``batch_per_rank`` or ``microbatch`` (sequences)
    in place of ``global_batch``; a table may have ``rounds`` of its own. Each round launches every case afresh, in an
    order of its own, so that drift of the machine does not favour one strategy. ``gate`` holds the limits of
    ``refshard gate``.
    ``only``, if given, names the cases to keep, by their names or by the beginnings of their hashes; references stay
    with them. ``network`` is the network between ranks, only for the launcher ``netlab``. With
    ``dry_run_first``, measured cases are dry-run before anything is launched on GPUs, and skipped if they will not fit.
    Records leave out what is not given, so that an older refshard reads every run that asks for nothing new.
    """

    name: str
    about: str = ""
    rounds: int = 1
    launcher: LauncherName = "local"
    network: NetworkSpec | None = None
    matrix: dict[str, Any] | list[dict[str, Any]]
    case: dict[str, Any] = {}
    gate: GateSpec = GateSpec()
    only: tuple[str, ...] = ()
    dry_run_first: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,63}", self.name):
            raise ValueError(f"name must be up to 64 letters, digits, '.', '-' or '_' (a folder's), got {self.name!r}")
        if not self.tables:
            raise ValueError("matrix must hold at least one table, got []")
        within("rounds", self.rounds, 1, most=MOST_ROUNDS)
        if self.launcher == "netlab" and self.network is None:
            raise ValueError("launcher 'netlab' needs the table [network], got none; add it, with hosts and rate")
        if self.launcher != "netlab" and self.network is not None:
            raise ValueError(
                f"network needs launcher 'netlab', got launcher '{self.launcher}'; set launcher = \"netlab\", or drop "
                "the table [network]"
            )
        check_keys("case", self.case, CASE_KEYS)
        for table in self.tables:
            check_keys("matrix", table, (*CASE_KEYS, "rounds"))
            if not is_count(rounds := table.get("rounds", 1)) or rounds > MOST_ROUNDS:
                raise ValueError(f"matrix.rounds must be an integer from 1 to {MOST_ROUNDS}, got {rounds!r}")
            if empty := next((key for key, values in table.items() if values == []), None):
                raise ValueError(f"matrix.{empty} must be a value or a list of at least one, got []")

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The matrices."""
        return self.matrix if isinstance(self.matrix, list) else [self.matrix]

    @property
    def most_rounds(self) -> int:
        """Rounds of the table that has most."""
        return max(int(table.get("rounds", self.rounds)) for table in self.tables)

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the strategies in the order in which the suite gives them, the reference first."""
        given = [value for table in self.tables for value in _listed({**self.case, **table}.get("strategy", []))]
        return tuple(dict.fromkeys([REFERENCE_STRATEGY, *map(str, given)]))

    @property
    def fixes_batch_per_rank(self) -> bool:
        """Whether all cases are given a batch per rank, so that world sizes compare at that."""
        return all("global_batch" not in _with_shared(table, self.case) for table in self.tables)

    def cases(self, round_: int = 0) -> tuple[Case, ...]:
        """The products of the tables that have a round of this number (from 0), without duplicates, each measured
        case's reference before it.

        Raises:
            SpecError: a combination is no valid case, or ``only`` names what is no case in any round.
        """
        found: dict[Case, None] = {}
        self._check_only()
        for case in self._products(round_):
            kept = self._keeps(case)
            if case.protocol.fidelity == "measured" and (kept or self._keeps(case.reference())):
                found.setdefault(case.reference())
            if kept:
                found.setdefault(case)
        return tuple(found)

    @property
    def named_references(self) -> frozenset[Case]:
        """References that a table names itself, in any of its rounds, even if other cases use them too."""
        return frozenset(case for case in self._products(0) if case == case.reference())

    def as_dry_run(self, cluster: str) -> "SuiteSpec":
        """The measured cases of this suite as dry runs on ``cluster``, one launch each.

        Raises:
            SpecError: no case is measured, or one cannot be a dry run.
        """
        kept = [case for case in self._products(0) if case.protocol.fidelity == "measured" and self._keeps(case)]
        if not kept:
            raise SpecError(f"suite '{self.name}': has no measured case to dry-run; add a table without a fidelity")
        as_dry_run = {"fidelity": "dryrun", "cluster": cluster}
        tables = [
            {**{key: value for key, value in table.items() if key != "rounds"}, **as_dry_run}
            for table in self.tables
            if "measured" in _listed({**self.case, **table}.get("fidelity", "measured"))
        ]
        try:
            only = tuple(case.as_dry_run(cluster).hash for case in kept) if self.only else ()
        except ValueError as error:
            raise SpecError(f"case: {error}") from None
        return SuiteSpec(name=self.name, about=self.about, matrix=tables, case=self.case, only=only)

    def _keeps(self, case: Case) -> bool:
        return not self.only or any(_is_named(case, name) for name in self.only)

    def _check_only(self) -> None:
        if not self.only:
            return
        every = list(self._products(0))
        every += [case.reference() for case in every if case.protocol.fidelity == "measured"]
        for name in self.only:
            if not any(_is_named(case, name) for case in every):
                known = sorted({case.name for case in every})
                raise SpecError(f"only: suite '{self.name}' has no case '{name}'; {nearest(name, known)}")

    def _products(self, round_: int) -> Iterator[Case]:
        for table in self.tables:
            fields = _with_shared(table, self.case)
            if fields.pop("rounds", self.rounds) <= round_:
                continue
            varied = {key: _listed(value) if key in table else [value] for key, value in fields.items()}
            for values in itertools.product(*varied.values()):
                case = _convert_case(dict(zip(varied, values)))
                if self.network is not None:
                    _check_networked(case, self.network)
                yield case


def _is_named(case: Case, name: str) -> bool:
    return name == case.name or (len(name) >= FEWEST_DIGITS and case.hash.startswith(name))


def _check_networked(case: Case, network: NetworkSpec) -> None:
    """The suite may mix in cases that are not measured: their wire is their cluster's, not this network."""
    network.ranks_per_host(case.job.gpus)
    network.ranks_per_host(case.processes)
    if case.protocol.device != "cpu":
        raise SpecError(
            f"device must be 'cpu' with launcher 'netlab', got '{case.protocol.device}': NCCL would bypass "
            'the network; set device = "cpu"'
        )


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _with_shared(table: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """A table's keys, and those of ``shared`` that it does not replace; one batch size replaces the other."""
    sizes = set(BATCH_KEYS)
    kept = {key: value for key, value in shared.items() if not (key in sizes and sizes & table.keys())}
    return {**table, **{key: value for key, value in kept.items() if key not in table}}


def _convert_case(given: dict[str, Any]) -> Case:
    fields = dict(given)
    sizes = [key for key in BATCH_KEYS if key in fields]
    if len(sizes) != 1:
        raise SpecError(
            f"case: exactly one of {', '.join(BATCH_KEYS)} must be given, got {' and '.join(sizes) or 'none'}"
        )
    if (key := sizes[0]) != "global_batch":
        size = fields.pop(key)
        if not is_count(size := read_as(parse_count, f"case: {key}", size) if isinstance(size, str) else size):
            raise SpecError(f"case: {key} must be an integer >= 1, got {size!r}")
        factors = ("gpus", "microbatches") if key == "microbatch" else ("gpus",)
        fields["global_batch"] = prod((size, *(n for factor in factors if is_count(n := fields.get(factor)))))
    if fields.get("strategy") == REFERENCE_STRATEGY and is_count(fields.get("gpus")):
        fields["gpus"] = 1  # the reference is one rank in every row of the matrix
        return Case.of(**fields)
    case = Case.of(**fields)
    if key == "microbatch":  # ranks of other axes share their data
        case = case.changed(global_batch=case.job.global_batch // case.job.gpus * case.job.data_ranks)
    return case


def find_suite(given: str) -> Path:
    """Resolve a suite given by path, or by the name or path of one that ships with refshard.

    Raises:
        SpecError: neither a file nor a shipped suite has this name.
    """
    path = Path(given)
    if path.is_file():
        return path
    shipped = resources.suites()
    if path.parent.name in ("", "suites") and path.stem in shipped and path.suffix in ("", ".toml"):
        return shipped[path.stem]
    raise SpecError(f"suite: no such file or suite '{given}'; {nearest(path.stem, list(shipped))}")


def load_suite(path: Path) -> SuiteSpec:
    """Read a suite from TOML.

    Raises:
        SpecError: the file cannot be read, is no TOML, or breaks the schema; the message names the field.
    """
    return convert(read_toml(path), SuiteSpec, where=path.name)


def parse_suite(text: str, where: str) -> SuiteSpec:
    """A suite from TOML's ``text``, which is ``where`` in messages.

    Raises:
        SpecError: it is no TOML, or breaks the schema; the message names the field.
    """
    return convert(parse_toml(text, where), SuiteSpec, where=where)
