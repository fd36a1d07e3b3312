"""A suite of one case, which ``refshard run`` dry-runs."""

import msgspec

from refshard import resources
from refshard.emit.tool import Emitted, Setting, above_one, applying, reduces, refuse, refuse_job
from refshard.specs.case import KEYS
from refshard.specs.job import Implementation
from refshard.specs.model import TRAINED, is_factory
from refshard.specs.suite import SuiteSpec
from refshard.specs.writing import to_toml
from refshard.version import __version__

FILE = "refshard.toml"
MODEL = "model.toml"
PLANNED_ONLY = frozenset({"megatron"})
"""Strategies that plans know and the harness does not."""
COMPILED = {"fsdp2": "fsdp2-compiled", "refshard-fsdp": "refshard-fsdp-compiled",
            "refshard-yafsdp": "refshard-yafsdp-compiled", "simplefsdp": "simplefsdp"}  # fmt: skip
"""The strategy that is another with compiled blocks."""
STAGED = ("ddp", "fsdp2")
"""Strategies that compose with a pipeline and with context parallelism."""
SPLIT = ("fsdp2", "refshard-replicate", "refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
"""Strategies that compose with tensor parallelism."""
SPLIT_BY_SEQUENCE = ("fsdp2",)
"""Strategies in which tensor parallelism splits norms and residuals by sequence."""
REDUCES_ONCE = frozenset({"ddp", "refshard-replicate", "refshard-zero1", "accelerate", "hf-trainer"})
UNSHARDED = frozenset({"ddp", "fsdp1-no-shard", "refshard-replicate"})
"""Strategies that replicate over all ranks, and so have no replicas."""


def emit(setting: Setting) -> Emitted:
    """The suite, and refshard's command.

    Raises:
        SpecError: no dry run can be so.
    """
    one, preset = setting.job, setting.job.model in resources.model_profiles()
    _check(setting)
    replicated = one.strategy in UNSHARDED
    run = msgspec.structs.replace(
        one, model=one.model if preset else MODEL, implementation=Implementation(),
        strategy=COMPILED.get(one.strategy, one.strategy) if one.implementation.compiled else one.strategy,
        sequence_parallel=one.tp > 1 and one.strategy in SPLIT_BY_SEQUENCE,
    )  # fmt: skip
    fields = {key: value for key, value in msgspec.to_builtins(run).items() if key in KEYS}
    suite_case = {**fields, "fidelity": "dryrun"}
    suite = SuiteSpec(name="emitted", about=f"{setting.title}: a dry run", matrix=suite_case)
    suite.cases()
    return Emitted(
        files={FILE: to_toml(suite), **({} if preset else {MODEL: to_toml(setting.model)})},
        command=f"refshard run {FILE}",
        version=__version__,
        notes=applying(
            (
                is_factory(one.model),
                f"The dry run is of refshard's Llama with the dimensions of {one.model}, not of its module.",
            ),
            (
                one.implementation.reduction == "bf16",
                "The dry run reduces gradients in fp32; the plan reduces them in bf16.",
            ),
            (
                not one.implementation.reshard and not replicated,
                "The dry run frees gathered parameters as the strategy does; the plan keeps them after forward.",
            ),
            *([reduces(setting, one.strategy, each=one.strategy not in REDUCES_ONCE)] if one.pp == 1 else []),
            (
                one.tp > 1 and one.strategy not in SPLIT_BY_SEQUENCE,
                "Tensor parallelism in the dry run does not split norms and residuals by sequence; the plan does.",
            ),
        ),
    )


def _check(setting: Setting) -> None:
    one = setting.job
    refuse(
        "refshard",
        (one.strategy in PLANNED_ONLY, f"strategy must be one that it runs, got '{one.strategy}'; emit for megatron"),
    )
    refuse_job("refshard", setting, llama=TRAINED, script=True)
    staged = above_one(setting, "pp", "cp", remedy=f"plan with --strategy {','.join(STAGED)}")
    split = above_one(setting, "tp", remedy="plan with --strategy fsdp2")
    refuse(
        "refshard",
        *(staged if one.strategy not in STAGED else []),
        *(split if one.strategy not in SPLIT else []),
        (
            one.schedule == "zero-bubble" and one.pp > 1 and one.checkpointing != "none",
            f"checkpointing must be 'none' for schedule 'zero-bubble', got '{one.checkpointing}'; plan with "
            "--checkpointing none or --schedule 1f1b",
        ),
        (one.precision == "fp8", "precision must be 'bf16' or 'fp32', got 'fp8'; emit for torchtitan or megatron"),
        (one.offload, "offload must be false, got true: it is not dry-run; leave out --offload"),
        (
            one.implementation.compiled and one.strategy not in {*COMPILED, *COMPILED.values()},
            f"compiled must be false for {one.strategy}, got true; plan with --strategy {','.join(COMPILED)}",
        ),
    )
