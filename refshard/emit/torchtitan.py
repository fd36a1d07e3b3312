"""torchtitan 0.3.0: a Python module with one configuration function, which ``--module`` and ``--config`` name.

torchtitan's wheel has no configuration files since 0.3.0; its ``ConfigManager`` imports the module from the folder in
which the job starts.
"""

from refshard.emit.job import (
    Emitted,
    Job,
    reduces_each,
    reduces_once,
    refuse_above_one,
    refuse_beyond_llama,
    refuse_checkpointing,
    refuse_experts,
    refuse_strategy,
    refuse_uneven,
)
from refshard.errors import SpecError
from refshard.specs.configuration import Configuration
from refshard.specs.model import ModelSpec

VERSION = "0.3.0"
MODULE = "refshard_torchtitan"
FUNCTION = "configuration"
STRATEGIES = ("ddp", "fsdp2", "fsdp2-tuned", "fsdp2-compiled", "simplefsdp")
FLAVORS: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    #       dim   layers heads kv  ffn    vocabulary tied
    "1B": (2048, 16, 32, 8, 8192, 128256, True),
    "3B": (3072, 28, 24, 8, 8192, 128256, True),
    "8B": (4096, 32, 32, 8, 14336, 128256, False),
    "70B": (8192, 80, 64, 8, 28672, 128256, False),
    "405B": (16384, 126, 128, 8, 53248, 128256, False),
}
"""The dimensions of torchtitan's Llama 3 flavors (``torchtitan/models/llama3/__init__.py``)."""
ASSETS = {"1B": "Llama-3.2-1B", "3B": "Llama-3.2-3B", "8B": "Llama-3.1-8B", "70B": "Llama-3.1-70B",
          "405B": "Llama-3.1-405B"}  # fmt: skip
POLICIES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}


def emit(job: Job) -> Emitted:
    """The module, and torchrun's command.

    Raises:
        SpecError: torchtitan cannot train so.
    """
    _check(job)
    graph = job.configuration.strategy == "simplefsdp"
    settings = [*_training(job), *_parallelism(job.configuration), *_beside(job.configuration, graph)]
    lines = [
        f'"""{job.title}: written by refshard for torchtitan {VERSION}."""',
        "",
        *_imports(job.configuration, graph),
        "",
        "",
        f"def {FUNCTION}() -> Trainer.Config:",
        '    """The job. Data, learning rate and number of steps are those of torchtitan\'s llama3_8b."""',
        "    config = llama3_8b()",
        *(f"    config.{line}" for line in settings),
        *(_as_graph() if graph else ["    return config"]),
    ]
    command = f"{job.torchrun} -m torchtitan.train --module {MODULE} --config {FUNCTION}"
    text = "\n".join(lines) + "\n"
    return Emitted(files={f"{MODULE}.py": text}, command=command, version=VERSION, notes=_notes(job))


def flavor_of(model: ModelSpec) -> str:
    """The flavor with the model's dimensions.

    Raises:
        SpecError: there is none.
    """
    given = (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim, model.vocab, model.tied)
    for name, dimensions in FLAVORS.items():
        if given == dimensions:
            return name
    raise SpecError(
        f"torchtitan: the model must have the dimensions of a Llama 3 flavor ({', '.join(FLAVORS)}), got "
        f"{model.n_layers} layers of width {model.dim}; choose one of these models, or emit for another tool"
    )


def _check(job: Job) -> None:
    asked = job.configuration
    refuse_strategy("torchtitan", job, STRATEGIES)
    refuse_experts("torchtitan", job)
    refuse_beyond_llama("torchtitan", job)
    flavor_of(job.model)
    refuse_checkpointing("torchtitan", job, tuple(POLICIES))
    refuse_uneven("torchtitan", job)
    if asked.strategy == "simplefsdp":
        refuse_above_one("torchtitan", job, "pipeline", remedy="plan with --strategy fsdp2 or --pipeline 1")
        if asked.checkpointing == "full":
            raise SpecError(
                "torchtitan: checkpointing must be 'none' or 'selective' for simplefsdp, got 'full'; plan with "
                "--checkpoint none,selective"
            )
        if asked.offload:
            raise SpecError("torchtitan: offload must be false for simplefsdp, got true; plan with --strategy fsdp2")
    if asked.strategy == "ddp":
        remedy = "its context ranks shard parameters: plan with --strategy fsdp2"
        refuse_above_one("torchtitan", job, "context", remedy=remedy)
    if asked.schedule == "zero-bubble" and asked.interleave == 1 and asked.pipeline > 1:
        raise SpecError(
            "torchtitan: interleave must be at least 2 for schedule 'zero-bubble', got 1; plan with --interleave 2 or "
            "--schedule 1f1b"
        )
    if asked.precision == "fp8" and not _compiles(asked):
        raise SpecError("torchtitan: compiled must be true for precision 'fp8', got false; plan with --compile yes")


def _compiles(asked: Configuration) -> bool:
    return asked.compiled or asked.strategy in ("fsdp2-compiled", "simplefsdp")


def _imports(asked: Configuration, graph: bool) -> list[str]:
    lines = ["from torchtitan.models.llama3 import model_registry"]
    lines.append("from torchtitan.models.llama3.config_registry import llama3_8b")
    lines.append("from torchtitan.trainer import Trainer")
    if asked.precision == "fp8":
        lines.append("from torchtitan.components.quantization import Float8LinearConverter")
    if asked.checkpointing != "none":
        policy = POLICIES[asked.checkpointing].partition(".")[0]
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    if graph:
        package = "torchtitan.experiments.graph_trainer"
        lines.append(f"from {package}.configs import GraphTrainerCompileConfig, to_graph_trainer_config")
        lines.append(f"from {package}.llama3 import model_registry as graph_registry")
    elif _compiles(asked):
        lines.append("from torchtitan.config import CompileConfig")
    return sorted(lines)


def _training(job: Job) -> list[str]:
    """Model, batch and precision. Under a pipeline, all of a rank's microbatches are its local batch."""
    asked, flavor = job.configuration, flavor_of(job.model)
    local = asked.microbatch * (asked.microbatches if asked.pipeline > 1 else 1)
    converter = 'Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)'
    converters = f", converters=[{converter}]" if asked.precision == "fp8" else ""
    return [
        f'model_spec = model_registry("{flavor}"{converters})',
        f'hf_assets_path = "./assets/hf/{ASSETS[flavor]}"',
        f"training.local_batch_size = {local}",
        f"training.global_batch_size = {asked.global_batch}",
        f"training.seq_len = {job.seq_len}",
        f'training.mixed_precision_param = "{"float32" if asked.precision == "fp32" else "bfloat16"}"',
        f"training.enable_cpu_offload = {asked.offload}",
        "training.disable_cuda_graphs = True",
        "profiler.enable_profiling = False",
    ]


def _parallelism(asked: Configuration) -> list[str]:
    whole = asked.strategy == "ddp"
    sizes = {
        "data_parallel_replicate_degree": asked.data_ranks if whole else asked.replicate,
        "data_parallel_shard_degree": 1 if whole else asked.shard,
        "tensor_parallel_degree": asked.tensor,
        "pipeline_parallel_degree": asked.pipeline,
        "context_parallel_degree": asked.context,
        "expert_parallel_degree": asked.expert,
    }
    lines = [f"parallelism.{name} = {size}" for name, size in sizes.items()]
    lines.append(f'parallelism.fsdp_reshard_after_forward = "{"always" if asked.reshard else "never"}"')
    # The default, "spmd_types", fails in FSDP2 with released versions of torch, up to 2.13.
    lines.append('parallelism.spmd_backend = "full_dtensor"')
    return lines + (_pipeline(asked) if asked.pipeline > 1 else [])


def _pipeline(asked: Configuration) -> list[str]:
    """The schedule, and layers divided evenly: the embedding and the head count as none."""
    schedule = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}
    return [
        f'parallelism.pipeline_parallel_schedule = "{schedule[asked.schedule]}"',
        f"parallelism.pipeline_parallel_microbatch_size = {asked.microbatch}",
        "parallelism.pipeline_parallel_first_stage_less_layers = 0",
        "parallelism.pipeline_parallel_last_stage_less_layers = 0",
        "parallelism.pipeline_parallel_layers_per_stage = "
        f"len(config.model_spec.model.layers) // {asked.pipeline * asked.interleave}",
    ]


def _beside(asked: Configuration, graph: bool) -> list[str]:
    lines = [f"activation_checkpoint = {POLICIES[asked.checkpointing]}"]
    if _compiles(asked) and not graph:
        lines.append('compile = CompileConfig(enable=True, components=["model"])')
    return lines


def _as_graph() -> list[str]:
    return [
        "    graph = to_graph_trainer_config(config, graph_registry)",
        "    graph.compile = GraphTrainerCompileConfig(enable=True)",
        "    return graph",
    ]


def _notes(job: Job) -> tuple[str, ...]:
    asked = job.configuration
    notes = ["Attention is FlexAttention, which torchtitan compiles: it needs Triton. The plan prices fused attention."]
    if job.model.rope_scaling is None:
        notes.append("torchtitan's flavors scale RoPE as Llama 3.1 does; this model does not scale it.")
    if asked.strategy == "ddp":
        notes.append("torchtitan replicates with FSDP2, unit by unit, not with DDP's buckets.")
    if asked.strategy == "fsdp2-tuned":
        notes.append("torchtitan has units for the embedding and the head, but not the other settings of fsdp2-tuned.")
    if asked.strategy == "simplefsdp":
        notes.append("SimpleFSDP is in torchtitan's experiment graph_trainer, which compiles the whole model.")
    if asked.reduction == "bf16":
        notes.append("torchtitan reduces gradients in fp32; the plan reduces them in bf16.")
    if asked.precision == "fp8":
        notes.append("fp8 scales by row (torchao's recipe 'rowwise'); the head stays in bf16.")
    return (*notes, *(reduces_once if asked.pipeline > 1 else reduces_each)(job, "torchtitan"))
