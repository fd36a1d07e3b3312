"""What of refshard can run on a machine, and what the rest lacks: of facts alone."""

import msgspec

from refshard.measure.doctor.facts import Facts
from refshard.resources import install_extra


class Ability(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that refshard does: whether it can here, and to what extent, or what it lacks."""

    name: str
    possible: bool
    about: str


def abilities(facts: Facts) -> tuple[Ability, ...]:
    """Everything that depends on the machine."""
    missing = [f"the program {name}" for name in ("ip", "tc") if name not in facts.programs]
    network = [*(() if facts.root else ("root",)), *missing]
    slurm = "sbatch" in facts.programs
    return (
        _on_gpus(facts),
        Ability(
            name="measured on CPUs",
            possible=True,
            about=f"up to {_count(facts.cores, 'rank')} of one thread, over gloo",
        ),
        Ability(
            name="emulated",
            possible=True,
            about="any world size, one real rank on " + ("a GPU or the CPU" if facts.torch.gpus else "the CPU"),
        ),
        Ability(
            name="dry runs",
            possible=not facts.dry_run_obstacle,
            about=facts.dry_run_obstacle or "any script, cluster and world size",
        ),
        Ability(name="plans", possible=True, about="any world size"),
        Ability(
            name="network emulation",
            possible=not network,
            about=f"lacks {', '.join(network)}" if network else "hosts on this machine, joined by a limited link",
        ),
        Ability(
            name="Slurm",
            possible=slurm,
            about='launcher = "slurm"' if slurm else "sbatch not found; run refshard on a login node",
        ),
        Ability(
            name="cross-check of traces",
            possible=facts.hta,
            about="refshard trace --cross-check hta" if facts.hta else f"lacks HTA: {install_extra('hta')}",
        ),
        _strategies(facts),
    )


def _on_gpus(facts: Facts) -> Ability:
    gpus = facts.torch.gpus
    if not gpus:
        return Ability(name="measured on GPUs", possible=False, about="torch sees no GPU")
    names = dict.fromkeys(gpu.name for gpu in gpus)
    return Ability(
        name="measured on GPUs", possible=True, about=f"up to {_count(len(gpus), 'rank')}: {', '.join(names)}"
    )


def _strategies(facts: Facts) -> Ability:
    here = facts.strategies - len(facts.unavailable)
    lacking = f"; not {', '.join(facts.unavailable)} (refshard list strategies says why)" if facts.unavailable else ""
    return Ability(name="strategies", possible=here > 0, about=f"{here} of {facts.strategies}{lacking}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
