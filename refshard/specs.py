"""What a user asks for: models, cases and suites, frozen and validated once, read from TOML.

A *suite* is a matrix; its product is a list of *cases*; a case is one training run of one strategy at one world
size, complete in itself and identified by the hash of its content.
"""

import hashlib
import itertools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest

Device = Literal["auto", "cpu", "cuda"]
LauncherName = Literal["local", "netlab"]
LARGEST = 2**40
"""Above what any count, limit or size in a suite can mean."""
REFERENCE_STRATEGY = "single"
"""The strategy that every other one's losses are held against: one unsharded rank."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Llama 3.1's stretching of RoPE wavelengths (source: the ``rope_scaling`` of each model's published config).

    Wavelengths over ``original_context / low_freq_factor`` tokens are divided by ``factor``, those under
    ``original_context / high_freq_factor`` stay, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions of a Llama-family model.

    ``params`` is the exact number of parameters, a tied embedding counted once. ``source`` says where the numbers
    come from.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool
    params: int
    source: str
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab", "params"):
            _within(field, getattr(self, field), 1)
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(
                f"dim must be n_heads times an even head dimension, got dim = {self.dim}, n_heads = {self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads = {self.n_heads}, got {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads


class CaseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run: what is trained, how it is sharded, and what is measured.

    ``global_batch`` is in sequences per step over all ranks, so the loss curve does not depend on ``world_size``.
    The ``warmup_steps`` are also the steps whose losses prove parity with one unsharded rank, hence at least 10.
    """

    strategy: str
    world_size: int
    model: str
    global_batch: int
    seq_len: int = 256
    seed: int = 0
    data: str = "synthetic"
    learning_rate: float = 1e-3
    device: Device = "auto"
    threads_per_rank: int = 1
    warmup_steps: int = 10
    measured_steps: int = 20
    traced_steps: int = 3
    time_limit_s: float = 600.0
    memory_limit_gib: float | None = None

    def __post_init__(self) -> None:
        for field in ("world_size", "global_batch", "seq_len", "threads_per_rank", "measured_steps", "traced_steps"):
            _within(field, getattr(self, field), 1)
        _within("warmup_steps", self.warmup_steps, 10)
        _within("seed", self.seed, 0)
        if self.strategy == REFERENCE_STRATEGY and self.world_size != 1:
            raise ValueError(f"world_size must be 1 for strategy '{REFERENCE_STRATEGY}', got {self.world_size}")
        if self.global_batch % self.world_size:
            raise ValueError(
                f"global_batch must be a multiple of world_size = {self.world_size}, got {self.global_batch}"
            )
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must lie between 0 and 1, got {self.learning_rate}")
        if not 0 < self.time_limit_s < LARGEST:
            raise ValueError(f"time_limit_s must be > 0 and finite, got {self.time_limit_s}")
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < LARGEST:
            raise ValueError(f"memory_limit_gib must be > 0 and finite, got {self.memory_limit_gib}")

    @property
    def name(self) -> str:
        """A short name, unique within a suite that varies only strategy, world size, model and batch."""
        return f"{self.strategy}-w{self.world_size}-{self.model}-b{self.global_batch}x{self.seq_len}"

    @property
    def hash(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of the spec's canonical JSON."""
        canonical = msgspec.json.encode(self, order="sorted")
        return hashlib.sha256(canonical).hexdigest()[:12]

    @property
    def total_steps(self) -> int:
        """Optimizer steps before the traced pass."""
        return self.warmup_steps + self.measured_steps

    def reference(self) -> "CaseSpec":
        """The same training on one unsharded rank, which this case's losses must equal."""
        return msgspec.structs.replace(self, strategy=REFERENCE_STRATEGY, world_size=1)


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that the launcher ``netlab`` makes of one machine, and what each of them can send.

    ``rate`` is a whole number of ``mbit`` or ``gbit`` (10^6 or 10^9 bits per second), such as ``"2gbit"``.
    """

    hosts: int
    rate: str

    def __post_init__(self) -> None:
        _within("hosts", self.hosts, 2, most=64)
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
                f"world_size must be 1 or a multiple of network.hosts = {self.hosts}, got {world_size}; change either"
            )
        return max(world_size // self.hosts, 1)


class SuiteSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matrix of cases.

    ``matrix`` holds lists, and its product is taken; ``case`` holds what all cases share. The keys of both are the
    fields of :class:`CaseSpec`, and ``batch_per_rank`` (sequences) in place of ``global_batch``. Each round launches
    every case afresh, in an order of its own, so that drift of the machine does not favour one strategy. ``network``
    says what the launcher ``netlab`` joins the ranks with, and is for it alone.
    """

    name: str
    about: str = ""
    rounds: int = 1
    launcher: LauncherName = "local"
    network: NetworkSpec | None = None
    matrix: dict[str, Any]
    case: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,63}", self.name):
            raise ValueError(f"name must be up to 64 letters, digits, '.', '-' or '_' (a folder's), got {self.name!r}")
        _within("rounds", self.rounds, 1, most=1000)
        if self.launcher == "netlab" and self.network is None:
            raise ValueError("launcher 'netlab' needs the table [network], got none; add it, with hosts and rate")
        if self.launcher != "netlab" and self.network is not None:
            raise ValueError(
                f"network is for launcher 'netlab', got launcher '{self.launcher}'; set launcher = \"netlab\", or drop "
                "the table [network]"
            )
        known = [*CaseSpec.__struct_fields__, "batch_per_rank"]
        for table in ("matrix", "case"):
            for key in getattr(self, table):
                if key not in known:
                    raise ValueError(f"{table} has the unknown key '{key}'; {nearest(key, known)}")
        both = sorted(set(self.matrix) & set(self.case))
        if both:
            raise ValueError(f"'{both[0]}' is in both matrix and case; keep one")
        for key, values in self.matrix.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"matrix.{key} must be a list of at least one value, got {values!r}")

    def cases(self) -> tuple[CaseSpec, ...]:
        """The product of the matrix, without duplicates, each case's reference before it.

        Raises:
            SpecError: a combination is no valid case.
        """
        found: dict[CaseSpec, None] = {}
        for values in itertools.product(*self.matrix.values()):
            case = _convert_case({**self.case, **dict(zip(self.matrix, values))})
            if self.network is not None:
                _check_networked(case, self.network)
            found.setdefault(case.reference())
            found.setdefault(case)
        return tuple(found)


def _check_networked(case: CaseSpec, network: NetworkSpec) -> None:
    network.ranks_per_host(case.world_size)
    if case.device != "cpu":
        raise SpecError(
            f"device must be 'cpu' with launcher 'netlab', got '{case.device}': NCCL would go from GPU to GPU, around "
            'the network; set device = "cpu"'
        )


def _convert_case(given: dict[str, Any]) -> CaseSpec:
    fields = dict(given)
    per_rank = fields.pop("batch_per_rank", None)
    if (per_rank is None) == ("global_batch" not in fields):
        raise SpecError("case: exactly one of global_batch and batch_per_rank must be given")
    if per_rank is not None:
        if not _is_count(per_rank):
            raise SpecError(f"case: batch_per_rank must be an integer >= 1, got {per_rank!r}")
        fields["global_batch"] = per_rank * fields["world_size"] if _is_count(fields.get("world_size")) else per_rank
    if fields.get("strategy") == REFERENCE_STRATEGY and _is_count(fields.get("world_size")):
        fields["world_size"] = 1  # the reference is one rank, whatever the matrix crosses it with
    return convert(fields, CaseSpec, where="case")


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
    raise SpecError(f"suite: no file '{given}'; {nearest(path.stem, list(shipped))}")


def load_suite(path: Path) -> SuiteSpec:
    """Read a suite from TOML.

    Raises:
        SpecError: the file cannot be read, is no TOML, or breaks the schema; the message names the field.
    """
    return convert(_read_toml(path), SuiteSpec, where=path.name)


def load_model(name: str) -> ModelSpec:
    """Read the model preset ``name`` from ``profiles/models/``.

    Raises:
        SpecError: there is no such preset.
    """
    presets = resources.model_profiles()
    if name not in presets:
        raise SpecError(f"model: no preset '{name}'; {nearest(name, list(presets))}")
    return convert(_read_toml(presets[name]), ModelSpec, where=f"model {name}")


T = TypeVar("T")


def convert(data: Mapping[str, Any], to: type[T], *, where: str) -> T:
    """Build the spec ``to`` from plain data.

    Raises:
        SpecError: with the field, the value and the remedy in one line.
    """
    try:
        return msgspec.convert(data, to)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}: {_explain(str(error), data, to)}") from None


def _explain(message: str, data: Mapping[str, Any], to: type) -> str:
    text, _, path = message.partition(" - at `$")
    keys = re.findall(r"[\w-]+", path.rstrip("`").replace("...", ""))
    if unknown := re.search(r"unknown field `(.+)`", text):
        fields: list[str] = list(getattr(_struct_at(to, keys), "__struct_fields__", ()))
        where = f"{'.'.join(keys)} has the " if keys else ""
        return f"{where}unknown key '{unknown[1]}'; {nearest(unknown[1], fields)}"
    if missing := re.search(r"missing required field `(.+)`", text):
        return f"{'.'.join([*keys, missing[1]])} is missing; add it"
    if not keys or text[0].islower():  # a rule of our own, which begins with the field's name and gives the value
        return ".".join([*keys, text])
    value: Any = data
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value.get(key)
    if "enum value" in text:
        text = f"{text}; known: {', '.join(map(str, get_args(get_type_hints(_struct_at(to, keys[:-1]))[keys[-1]])))}"
    return f"{'.'.join(keys)}: {text[0].lower()}{text[1:]} (got {value!r})"


def _struct_at(to: type, keys: list[str]) -> type:
    """The struct to which ``keys`` lead from the struct ``to``, by way of optional fields too."""
    for key in keys:
        hint = get_type_hints(to)[key]
        to = next((t for t in (hint, *get_args(hint)) if isinstance(t, type) and issubclass(t, msgspec.Struct)), to)
    return to


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid TOML ({error}); correct that line") from None


def _within(field: str, value: int, least: int, *, most: int = LARGEST) -> None:
    if value < least:
        raise ValueError(f"{field} must be >= {least}, got {value}")
    if value > most:
        raise ValueError(f"{field} must be <= {most}, got {value}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
