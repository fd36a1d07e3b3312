"""What the memory model says of a case that a suite names."""

from refshard.estimate.recipe import RECIPES
from refshard.memory.tensors import Batch, Device
from refshard.memory.walk import MemoryForecast, RankJob, predict_memory
from refshard.specs.case import REFERENCE_STRATEGY, CaseSpec
from refshard.specs.layers import checkpointing_of
from refshard.specs.model import beyond_llama, known_dimensions


def memory_of(case: CaseSpec, device: Device) -> MemoryForecast | None:
    """One rank of ``case`` over NCCL on CUDA and gloo on a CPU; None where the model knows no such case: bf16 on a CPU
    is one, a factory's module another, and so is what is no Llama.

    Raises:
        SpecError: the case's model cannot be read.
    """
    if case.workload != "training" or case.unmodelled or case.strategy not in (REFERENCE_STRATEGY, *RECIPES):
        return None
    if case.precision != "fp32" and device == "cpu":
        return None
    model = known_dimensions(case.model)
    if model is None or beyond_llama(model) is not None:
        return None
    sequences = case.global_batch // case.world_size // case.microbatches
    job = RankJob(
        model=model,
        world_size=case.world_size,
        batch=Batch(sequences=sequences, seq_len=case.seq_len, dtype=case.precision),
        microbatches=case.microbatches,
        checkpointing=checkpointing_of(case.checkpointing, model.n_layers),
        device=device,
        library="nccl" if device == "cuda" else "gloo",
    )
    return predict_memory(job, RECIPES.get(case.strategy))
