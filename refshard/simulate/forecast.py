"""What a step of one model on one cluster would take with one strategy, and what of it is spent on what."""

from dataclasses import dataclass, replace

import msgspec

from refshard.errors import SpecError
from refshard.flops import Convention, flops_per_token
from refshard.plan.checkpointing import NO_CHECKPOINTING, Checkpointing
from refshard.plan.recipe import Recipe
from refshard.plan.units import model_units
from refshard.simulate.account import Account, account
from refshard.simulate.clock import NS, Rates, Schedule, schedule
from refshard.simulate.kernels import Batch
from refshard.simulate.pricing import Pricing
from refshard.simulate.program import Item, StepShape, step_program
from refshard.simulate.trace import as_timeline
from refshard.specs.cluster import ClusterSpec
from refshard.specs.hardware import Dtype
from refshard.specs.model import ELSEWHERE, ModelSpec, check_llama
from refshard.timeline import Kind

CONVENTION: Convention = "A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained and where.

    Each rank computes ``microbatches`` of ``sequences`` of ``seq_len`` tokens in a step, in ``dtype`` over fp32
    masters; gradients are reduced in ``reduction``. ``replicas`` is the size of the mesh's replicate axis, for
    strategies that shard. ``compiled`` blocks have their elementwise kernels fused; for ``fused_norms`` see
    :class:`~refshard.simulate.kernels.Batch`.
    """

    model: ModelSpec
    cluster: ClusterSpec
    seq_len: int
    sequences: int = 1
    microbatches: int = 1
    dtype: Dtype = "bf16"
    reduction: Dtype = "fp32"
    replicas: int = 1
    compiled: bool = False
    fused_norms: bool = True

    def __post_init__(self) -> None:
        """Check what no field can tell by itself.

        Raises:
            SpecError: the model is no Llama, the hardware's profile does not know the dtype, or the replicas do not
                divide the ranks.
        """
        check_llama(self.model, "simulations", remedy=ELSEWHERE)
        known = self.cluster.accelerator.attention
        if self.dtype not in known:
            raise SpecError(
                f"dtype: the hardware's profile knows {', '.join(known)}, got {self.dtype}; choose one of them"
            )
        if self.replicas < 1 or self.cluster.world_size % self.replicas:
            raise SpecError(
                f"replicas must divide the {self.cluster.world_size} ranks of the cluster, got {self.replicas}; choose "
                "a number that does"
            )

    @property
    def batch(self) -> Batch:
        """One microbatch."""
        return Batch(
            sequences=self.sequences,
            seq_len=self.seq_len,
            dtype=self.dtype,
            compiled=self.compiled,
            fused_norms=self.fused_norms and self.cluster.accelerator.device == "cuda",
        )

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one rank and step."""
        return self.microbatches * self.batch.tokens


class StepForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One step's time. ``preparation_s`` is what it would save if the kernels that prepare reductions beside compute
    took nothing; ``exposed_comm_s`` is communication during which no compute runs. ``flops_convention`` is that of MFU,
    whose peak is the hardware's data sheet's for the dtype.
    """

    step_time_s: float
    account: Account
    preparation_s: float
    exposed_comm_s: float
    tokens_per_s_gpu: float
    tflops: float
    mfu: float
    flops_convention: Convention = CONVENTION


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A step as it was simulated."""

    items: tuple[Item, ...]
    times: Schedule


def simulate(job: Job, recipe: Recipe, checkpointing: Checkpointing = NO_CHECKPOINTING) -> Simulation:
    """Simulate one step."""
    items = _program(job, recipe, checkpointing)
    return Simulation(items, schedule(items, _rates(job.cluster)))


def forecast_step(job: Job, recipe: Recipe, checkpointing: Checkpointing = NO_CHECKPOINTING) -> StepForecast:
    """One step's time and what it is spent on."""
    run = simulate(job, recipe, checkpointing)
    step_time, timeline = run.times.length / NS, as_timeline(run.items, run.times)
    tokens_per_s = job.tokens_per_rank / step_time
    flops = tokens_per_s * flops_per_token(job.model, job.seq_len, CONVENTION)
    return StepForecast(
        step_time_s=step_time,
        account=account(run.items, run.times),
        preparation_s=_preparation(job, run),
        exposed_comm_s=(timeline.busy(Kind.COMM) - timeline.busy(Kind.COMPUTE)).length / NS,
        tokens_per_s_gpu=tokens_per_s,
        tflops=flops / 1e12,
        mfu=flops / job.cluster.accelerator.matmul[job.dtype].peak,
    )


def _program(job: Job, recipe: Recipe, checkpointing: Checkpointing) -> tuple[Item, ...]:
    pricing = Pricing(recipe, job.model, job.cluster, job.batch, job.reduction, job.replicas)
    shape = StepShape(microbatches=job.microbatches, checkpointing=checkpointing)
    return step_program(recipe, model_units(job.model, recipe.grouping), pricing, shape)


def _rates(cluster: ClusterSpec) -> Rates:
    return Rates(
        compute=cluster.compute_beside_communication,
        communication=cluster.communication_beside_compute,
        preparation=cluster.preparation_beside_compute,
    )


def _preparation(job: Job, run: Simulation) -> float:
    """What the step would save if the kernels beside compute that prepare reductions took nothing."""
    spared = [
        replace(item, seconds=0.0) if item.kind is Kind.PREP and item.lane != "compute" else item for item in run.items
    ]
    return max(0, run.times.length - schedule(spared, _rates(job.cluster)).length) / NS
