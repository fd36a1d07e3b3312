"""What a user asks for: models, cases and suites, frozen and validated once, read from TOML.

A *suite* is one or more matrices; their products are a list of *cases*; a case is one run of one strategy at one world
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
Workload = Literal["training", "inference"]
LARGEST = 2**40
"""Above what any count, limit or size in a suite can mean."""
MOST_ROUNDS = 1000
_COUNTS = (
    "world_size", "global_batch", "seq_len", "microbatches", "threads_per_rank", "measured_steps", "traced_steps"
)  # fmt: skip
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
    """One run: what is computed, how it is sharded, and what is measured.

    ``global_batch`` is in sequences per step over all ranks, so the loss curve does not depend on ``world_size``.
    The ``warmup_steps`` are also the steps whose losses prove parity with one unsharded rank, hence at least 10.

    Three axes beside strategy and world size change what a step does. ``workload`` is training, or inference: forward
    and loss under ``no_grad``, no backward and no optimizer step. ``microbatches`` is the number of parts of each
    rank's batch whose gradients are accumulated before one optimizer step. ``checkpointing`` says which layers keep
    their input only and compute their activations again in backward: ``"none"``, ``"full"``, ``"every-K"`` (each K-th
    layer), or the layers' indices.
    """

    strategy: str
    world_size: int
    model: str
    global_batch: int
    seq_len: int = 256
    workload: Workload = "training"
    microbatches: int = 1
    checkpointing: str | tuple[int, ...] = "none"
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
        for field in _COUNTS:
            _within(field, getattr(self, field), 1)
        _within("warmup_steps", self.warmup_steps, 10)
        _within("seed", self.seed, 0)
        if self.strategy == REFERENCE_STRATEGY and self.world_size != 1:
            raise ValueError(f"world_size must be 1 for strategy '{REFERENCE_STRATEGY}', got {self.world_size}")
        if self.global_batch % self.world_size:
            raise ValueError(
                f"global_batch must be a multiple of world_size = {self.world_size}, got {self.global_batch}"
            )
        self._check_axes()
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must lie between 0 and 1, got {self.learning_rate}")
        if not 0 < self.time_limit_s < LARGEST:
            raise ValueError(f"time_limit_s must be > 0 and finite, got {self.time_limit_s}")
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < LARGEST:
            raise ValueError(f"memory_limit_gib must be > 0 and finite, got {self.memory_limit_gib}")

    def _check_axes(self) -> None:
        if self.global_batch % (self.world_size * self.microbatches):
            raise ValueError(
                f"global_batch must be a multiple of world_size * microbatches = {self.world_size} * "
                f"{self.microbatches}, got {self.global_batch}"
            )
        policy = self.checkpointing
        if isinstance(policy, str) and not re.fullmatch(r"none|full|every-[1-9]\d{0,5}", policy):
            raise ValueError(f"checkpointing must be 'none', 'full', 'every-K' or a list of layers, got {policy!r}")
        if isinstance(policy, tuple) and (not policy or min(policy) < 0 or len(set(policy)) < len(policy)):
            raise ValueError(
                f"checkpointing must list different layers, counted from 0, at least one of them, got {list(policy)}; "
                "write 'none' for no layer"
            )
        if self.workload == "inference":
            for field, only in (("microbatches", 1), ("checkpointing", "none")):
                if (given := getattr(self, field)) != only:
                    raise ValueError(
                        f"{field} must be {only!r} for workload 'inference', which has no backward, got {given!r}"
                    )

    @property
    def axes(self) -> tuple[str, ...]:
        """In words, how this case departs from plain training; empty for most."""
        words: list[str] = [] if self.workload == "training" else [self.workload]
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if isinstance(self.checkpointing, tuple):
            listed = "+".join(map(str, self.checkpointing[:8]))
            words.append(f"checkpointing of layers {listed}{'+...' if len(self.checkpointing) > 8 else ''}")
        elif self.checkpointing != "none":
            words.append(f"checkpointing {self.checkpointing}")
        return tuple(words)

    @property
    def name(self) -> str:
        """A short name, unique within a suite that varies only strategy, world size, model, batch and axes."""
        plain = f"{self.strategy}-w{self.world_size}-{self.model}-b{self.global_batch}x{self.seq_len}"
        return "-".join([plain, *self.axes]).replace(" ", "-")

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
        """The same batches on one unsharded rank, which this case's losses must equal.

        It accumulates and recomputes nothing: neither may change a loss, so the proof covers them too.
        """
        return msgspec.structs.replace(
            self, strategy=REFERENCE_STRATEGY, world_size=1, microbatches=1, checkpointing="none"
        )


class SuiteSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One or more matrices of cases.

    ``matrix`` is a table, or a list of tables. In each, lists are crossed with one another and any other value holds
    for all its cases; ``case`` holds what the cases of every table share, and a table's own values go before it. The
    keys are the fields of :class:`CaseSpec`, and ``batch_per_rank`` (sequences) in place of ``global_batch``; a table
    may have ``rounds`` of its own. Each round launches every case afresh, in an order of its own, so that drift of the
    machine does not favour one strategy.
    """

    name: str
    about: str = ""
    rounds: int = 1
    matrix: dict[str, Any] | list[dict[str, Any]]
    case: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,63}", self.name):
            raise ValueError(f"name must be up to 64 letters, digits, '.', '-' or '_' (a folder's), got {self.name!r}")
        if not self.tables:
            raise ValueError("matrix must hold at least one table, got []")
        _within("rounds", self.rounds, 1, most=MOST_ROUNDS)
        known = [*CaseSpec.__struct_fields__, "batch_per_rank"]
        _check_keys("case", self.case, known)
        for table in self.tables:
            _check_keys("matrix", table, [*known, "rounds"])
            if not _is_count(rounds := table.get("rounds", 1)) or rounds > MOST_ROUNDS:
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
        return all("batch_per_rank" in _with_shared(table, self.case) for table in self.tables)

    def cases(self, round_: int = 0) -> tuple[CaseSpec, ...]:
        """The products of the tables that have a round of this number (from 0), without duplicates, each case's
        reference before it.

        Raises:
            SpecError: a combination is no valid case.
        """
        found: dict[CaseSpec, None] = {}
        for table in self.tables:
            fields = _with_shared(table, self.case)
            if fields.pop("rounds", self.rounds) <= round_:
                continue
            varied = {key: _listed(value) if key in table else [value] for key, value in fields.items()}
            for values in itertools.product(*varied.values()):
                case = _convert_case(dict(zip(varied, values)))
                found.setdefault(case.reference())
                found.setdefault(case)
        return tuple(found)


def _check_keys(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where} has the unknown key '{key}'; {nearest(key, known)}")


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _with_shared(table: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """A table's keys, and those of ``shared`` that it does not replace; one batch size replaces the other."""
    sizes = {"global_batch", "batch_per_rank"}
    kept = {key: value for key, value in shared.items() if not (key in sizes and sizes & table.keys())}
    return {**table, **{key: value for key, value in kept.items() if key not in table}}


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
        fields: list[str] = list(getattr(to, "__struct_fields__", ()))
        return f"unknown key '{unknown[1]}'; {nearest(unknown[1], fields)}"
    if missing := re.search(r"missing required field `(.+)`", text):
        return f"{missing[1]} is missing; add it"
    if not keys:
        return text
    value: Any = data
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value.get(key)
    if "enum value" in text:
        text = f"{text}; known: {', '.join(map(str, get_args(get_type_hints(to)[keys[-1]])))}"
    return f"{'.'.join(keys)}: {text[0].lower()}{text[1:]} (got {value!r})"


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
