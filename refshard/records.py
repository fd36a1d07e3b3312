"""What a run writes down: the measurement schema and the table of metrics.

A run's ``records.jsonl`` holds one :class:`RunRecord`, then a :class:`LaunchRecord` per finished launch of a case, then
one :class:`EndRecord`. Raw samples are kept per rank and step; summaries are derived from them.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from refshard.specs.case import RENAMED, Case, Fidelity, Protocol
from refshard.specs.model import ModelSpec
from refshard.specs.suite import SuiteSpec

SCHEMA = 2
"""Version 1 is read too (:func:`from_schema_1`)."""
PARITY_TOLERANCE = 1e-5
"""Largest relative difference of an fp32 loss from the reference's: splitting the batch alone costs about 1e-6."""
_BF16_TOLERANCE = 2e-2
"""Tolerance of a bf16 loss against the fp32 reference: AdamW's first steps follow the signs of gradients, and small
gradients lose theirs in 8 bits. Among themselves the strategies agree far better, and most to the bit.
"""
_8BIT_TOLERANCE = 1e-3
"""Tolerance with an 8-bit optimizer: its blocks of 256 elements start with the shard, not where the whole's do."""
_MUON_TOLERANCE = 5e-4
"""Tolerance with Muon, which orthogonalises in bf16: a last bit of a gradient may change an update by 2 %, and
losses by up to 1e-4. Muon over parts of matrices in place of matrices changes them by 1e-3 and more.
"""

State = Literal["ok", "oom", "timeout", "failed", "unsupported", "skipped"]


class Metric(msgspec.Struct, frozen=True):
    """A quantity and its meaning.

    ``better`` says which direction is good; ``kind`` is ``exact`` for what must not vary between two runs of the same
    code and ``noisy`` for what a machine's mood changes. A dry run repeats every metric exactly.
    """

    name: str
    label: str
    unit: Literal["s", "B", "tokens/s", "TFLOPS", "fraction", "ratio"]
    better: Literal["lower", "higher", "neither"]
    kind: Literal["exact", "noisy"]
    meaning: str


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("step_time_s", "step time", "s", "lower", "noisy",
               "median over steps of the maximum over ranks of synchronised wall time, profiler off; "
               "of inference, a step is a forward pass and its loss"),
        Metric("tokens_per_s_gpu", "tokens/s/GPU", "tokens/s", "higher", "noisy",
               "tokens of the global batch / step time / world size (on a CPU: per rank)"),
        Metric("tflops", "TFLOPS", "TFLOPS", "higher", "noisy",
               "model FLOPs per rank and second by the named convention, recompute not counted"),
        Metric("mfu", "MFU", "fraction", "higher", "noisy",
               "TFLOPS over the device's peak; the record names the peak and its source"),
        Metric("peak_memory_bytes", "peak memory", "B", "lower", "noisy",
               "maximum over ranks of the allocator's peak: on a CPU within a step, on a GPU over the measured steps, "
               "in a dry run over all steps"),
        Metric("peak_active_bytes", "peak active memory", "B", "lower", "noisy",
               "peak memory, plus blocks that were freed while another stream still needed them; none on a CPU"),
        Metric("peak_reserved_bytes", "peak reserved memory", "B", "lower", "noisy",
               "maximum over ranks of what the caching allocator had taken from the device, over the same steps as the "
               "peak memory; decides whether a case fits; none on a CPU"),
        Metric("rss_bytes", "peak RSS", "B", "lower", "noisy",
               "maximum over ranks of the process's peak resident set, libraries included"),
        Metric("compute_s", "compute", "s", "neither", "noisy",
               "traced compute per step, mean over steps and ranks"),
        Metric("comm_s", "communication", "s", "lower", "noisy",
               "traced communication per step, mean over steps and ranks"),
        Metric("exposed_comm_s", "exposed communication", "s", "lower", "noisy",
               "communication during which no compute runs, per step, mean over steps and ranks"),
        Metric("overlap_ratio", "overlap ratio", "fraction", "higher", "noisy",
               "1 - exposed / communication; none without communication"),
        Metric("overlap_efficiency", "overlap efficiency", "fraction", "higher", "noisy",
               "lower bound / step time, the bound being the longest of compute alone, bytes over link bandwidth, and "
               "the critical path from first gather to last reduce; none where the link's rate is unknown"),
        Metric("idle_s", "idle", "s", "lower", "noisy",
               "step time with neither compute nor communication, mean over steps and ranks"),
        Metric("perturbation", "perturbation", "ratio", "lower", "noisy",
               "traced step time / untraced step time"),
        Metric("synchronisation", "synchronised / free-running", "ratio", "lower", "noisy",
               "step time / step time without host synchronisation between steps; on GPUs only"),
        Metric("loss_parity", "loss parity", "ratio", "lower", "exact",
               "largest relative difference of a step's loss from one unsharded rank on the same tokens; where the "
               "model is too large for one rank, of the same case with a reduced model"),
    )
}  # fmt: skip
"""Every metric of a case, in the order in which tables show them."""

DERIVED = frozenset({"overlap_efficiency"})
"""Metrics that take several cases of a run to compute: reports have them, records do not."""


def parity_tolerance(case: Case) -> float:
    """Largest relative difference of a loss from the reference's, by what the case computes in."""
    if case.job.precision == "bf16":
        return _BF16_TOLERANCE
    return {"adamw-8bit": _8BIT_TOLERANCE, "muon": _MUON_TOLERANCE}.get(case.job.optimizer, PARITY_TOLERANCE)


def timestamp() -> str:
    """The time now as records have it: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one GPU is set up, as NVML reports it; None where it does not.

    The application clocks are as set with ``nvidia-smi -ac``. ``nvlinks`` counts active NVLinks by
    what is at their other end: ``GPU 1``, or ``switch``.
    """

    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_sm_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    application_sm_clock_mhz: int | None = None
    application_memory_clock_mhz: int | None = None
    ecc: bool | None = None
    mig: bool | None = None
    nvlinks: dict[str, int] = {}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Machine and software that a run was measured on. ``id`` is the hash of everything that must match between two
    comparable runs; the git state, the command line and the time are not part of it.

    ``gemm_flops_per_s`` is this machine's measured fp32 matrix-multiplication rate with ``gemm_threads`` threads.
    ``code_sha256`` is of refshard's own code and profiles, independent of git; empty in older records.
    ``network`` says in words what joins the hosts; empty where all ranks run on one.

    All that follows is known on machines with GPUs only. ``gpu_memory_bytes`` is what torch reports of each.
    ``gpu_driver`` comes from NVML, as do ``gpu_settings`` and ``gpu_throttled``, the reasons why each GPU's clocks were
    held down as the run began; all three are empty without nvidia-ml-py. ``cuda`` and ``nccl`` are the versions that
    torch uses. ``tf32`` says that torch may round the operands of fp32 matrix products to TF32; by default it may not.
    ``variables`` are the environment variables that configure CUDA, NCCL and torch's allocator.
    """

    id: str
    hostname: str
    os: str
    cpu: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    python: str
    torch: str
    backends: tuple[str, ...]
    packages: dict[str, str]
    gemm_flops_per_s: float
    gemm_threads: int
    git_commit: str | None
    git_dirty: bool | None
    code_sha256: str = ""
    argv: tuple[str, ...]
    network: str = ""
    gpu_memory_bytes: tuple[int, ...] = ()
    gpu_driver: str = ""
    gpu_settings: tuple[GpuSettings, ...] = ()
    gpu_throttled: tuple[tuple[str, ...], ...] = ()
    cuda: str = ""
    nccl: str = ""
    tf32: bool = False
    variables: dict[str, str] = {}


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="run"):
    """First line of a run. ``planned`` counts launches: cases times rounds. ``files`` has the SHA-256, in hexadecimal,
    of each file that cases name (a model, a factory's module, a cluster, tokens), by the name that they give.
    ``models`` has the dimensions of models from files, so that a report does not need the files.
    """

    schema: int = SCHEMA
    run_id: str
    refshard: str
    started_at: str
    suite: SuiteSpec
    environment: Environment
    planned: int
    files: dict[str, str] = {}
    models: dict[str, ModelSpec] = {}


class CollectiveCount(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Number and total bytes of one kind of collective per rank and step; bytes as in ``timeline.Collective``."""

    op: str
    count: int
    bytes: int


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """Operators that one step of one rank called in torch, how many results needed new memory, of how many bytes in
    all; and the SHA-256 of the operators' names in order, in hexadecimal. In a dry run also how often a stream waits
    for an event; the order then includes streams and waits.
    """

    operators: int
    allocations: int
    allocated_bytes: int
    order_sha256: str
    stream_waits: int | None = None


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that the strategy did what its plan announced.

    ``bit_identical_to_ddp`` compares every loss and the final parameters with DDP's at the same world size; where it
    is false or unknown, ``bits_note`` says why. ``parity_note`` says why there is no ``loss_parity``, or why it is not
    the case's own but that of the case ``parity_of`` names: empty for the case itself. ``parity_tolerance`` is how
    large it may be; none in older records. ``collectives_note`` says why ``traced`` is not complete, if it is not.
    """

    wrapped_units: tuple[str, ...]
    announced: tuple[CollectiveCount, ...]
    traced: tuple[CollectiveCount, ...]
    collectives_note: str = ""
    parity_steps: int
    loss_parity: float | None
    parity_note: str = ""
    parity_of: str = ""
    parity_tolerance: float | None = None
    parameters_sha256: str
    bit_identical_to_ddp: bool | None = None
    bits_note: str = ""
    failures: tuple[str, ...] = ()


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One traced step of one rank, in nanoseconds."""

    rank: int
    step: int
    span_ns: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int
    idle_ns: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the machine was around the timed steps of a launch, of several hosts the busiest.

    ``probe_before_s`` and ``probe_after_s`` are what one and the same matrix product took on the slowest rank, s, right
    before and right after the timed steps. Meanwhile processes other than the ranks kept ``other_cores`` of ``cores``
    busy on average; None where the system does not tell.
    """

    probe_before_s: float
    probe_after_s: float
    other_cores: float | None
    cores: int


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's readings of one GPU while steps were timed: means over ``samples``, and the extremes.

    ``host`` counts hosts in order of their ranks, ``gpu`` the GPUs that torch sees there. ``throttled`` counts the
    samples in which a reason held the clocks down. None where NVML does not say.
    """

    host: int = 0
    gpu: int
    samples: int
    power_w: float | None = None
    max_power_w: float | None = None
    sm_clock_mhz: float | None = None
    min_sm_clock_mhz: int | None = None
    throttled: dict[str, int] = {}


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank's GPU, bytes.

    The first four are the peaks of the caching allocator over the measured steps, as ``torch.cuda.memory_stats`` names
    them. What was allocated, active or requested before the model was built is subtracted. Nothing is subtracted from
    ``reserved_bytes``, since all of it must fit. ``retries`` counts allocations in these steps that the device refused
    until the allocator had given its cache back, ``ooms`` allocations refused even then.

    After the steps ``used_bytes`` of the device's ``total_bytes`` are in use, by any process. ``outside_bytes`` of them
    are not the allocator's: CUDA's context, NCCL's buffers, libraries, other processes.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    requested_bytes: int
    retries: int
    ooms: int
    used_bytes: int
    outside_bytes: int
    total_bytes: int


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="case"):
    """One launch of one case, ended in one of the terminal states.

    ``step_times_s[rank][step]`` are the raw samples. ``metrics`` has a key for every entry of :data:`METRICS` that is
    not :data:`DERIVED`, None where the quantity does not exist; older records lack later metrics, and a dry run that
    ended out of memory has what it would have taken without a limit. ``recompute`` says which layers computed their
    forward twice, which no FLOPs here count. ``census`` is rank 0's, and so is ``memory_course_bytes``: the highest
    that the allocator held in each of up to 128 stretches of an early step, of as many operators each; empty where
    nothing watched it. ``host_waits`` counts how often the host waits for the device in a step, by reason; None where
    nothing watched. ``compile_s`` is the longest of the ranks' times in torch's compiler, s, over the whole launch,
    without reuse from an earlier one; None where nothing was compiled. ``load`` is None in calculated and in older
    records. ``gpu_use`` is empty where nothing watches GPUs. ``gpu_memory[rank]`` is empty on CPUs and in calculated
    and older records. ``traces`` are paths relative to the run's folder.
    """

    schema: int = SCHEMA
    run_id: str
    environment: str
    case: Case
    spec_hash: str
    round: int
    fidelity: Fidelity
    state: State
    error: str | None = None
    log_tail: tuple[str, ...] = ()
    started_at: str
    duration_s: float
    device: str = ""
    backend: str = ""
    step_times_s: tuple[tuple[float, ...], ...] = ()
    traced_step_times_s: tuple[tuple[float, ...], ...] = ()
    losses: tuple[float, ...] = ()
    metrics: dict[str, float | None] = {}
    flops_convention: str = ""
    flops_per_token: float | None = None
    recompute: str = ""
    peak_flops_per_s: float | None = None
    peak_source: str = ""
    steps: tuple[StepTrace, ...] = ()
    census: Census | None = None
    memory_course_bytes: tuple[int, ...] = ()
    host_waits: dict[str, int] | None = None
    compile_s: float | None = None
    load: Load | None = None
    gpu_use: tuple[GpuUse, ...] = ()
    gpu_memory: tuple[GpuMemory, ...] = ()
    traces: tuple[str, ...] = ()
    proof: Proof | None = None
    warnings: tuple[str, ...] = ()


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """Last line of a run that ended by itself; a run without it was cut off, and one that was resumed holds several.

    ``cases`` and ``states`` count its launches, a repeated one once. ``sha256`` is that of all lines before, in
    hexadecimal; empty where an older refshard wrote it.
    """

    schema: int = SCHEMA
    run_id: str
    ended_at: str
    cases: int
    states: dict[str, int]
    interrupted: bool = False
    sha256: str = ""


Record = RunRecord | LaunchRecord | EndRecord


def from_schema_1(line: Mapping[str, Any]) -> Record:
    """A record of schema 1, which named fields of cases in other words and did not tell job from protocol.

    Raises:
        msgspec.ValidationError: the line is no such record.
    """

    def renamed(fields: object) -> dict[str, Any]:
        return {RENAMED.get(key, key): value for key, value in msgspec.convert(fields, dict[str, Any]).items()}

    changed = dict(line)
    if "case" in line:
        case = renamed(line["case"])
        changed["case"] = {
            "job": {key: value for key, value in case.items() if key not in Protocol.__struct_fields__},
            "protocol": {key: value for key, value in case.items() if key in Protocol.__struct_fields__},
        }
    if "suite" in line:
        suite = msgspec.convert(line["suite"], dict[str, Any])
        tables = suite.get("matrix")
        matrix = [renamed(table) for table in tables] if isinstance(tables, list) else renamed(tables)
        changed["suite"] = {**suite, "matrix": matrix, "case": renamed(suite.get("case", {}))}
    record: Record = msgspec.convert(changed, Record)
    return record


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run as read back: its header, the launches that finished, and the closing line if it has one."""

    header: RunRecord
    launches: tuple[LaunchRecord, ...]
    end: EndRecord | None = None

    @property
    def well(self) -> bool:
        """Whether every launch ended ok, is unsupported or was skipped, which are results and no failures."""
        return all(case.state in ("ok", "unsupported", "skipped") for case in self.launches)
