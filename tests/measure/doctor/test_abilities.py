"""What can run on a machine, and what the rest lacks."""

from msgspec.structs import replace

from refshard.measure.doctor import Ability, Facts, abilities
from tests.measure.doctor.machines import CPU_ONLY, DGX


def by_name(facts: Facts) -> dict[str, Ability]:
    return {one.name: one for one in abilities(facts)}


def test_a_machine_without_gpus_measures_on_its_cores() -> None:
    found = by_name(CPU_ONLY)
    assert [name for name, one in found.items() if not one.possible] == [
        "measured on GPUs", "Slurm", "cross-check of traces",
    ]  # fmt: skip
    assert found["measured on CPUs"].about == "up to 64 ranks of one thread, over gloo"
    assert found["emulated"].about == "any world size, one real rank on the CPU"
    assert found["strategies"].about == "28 of 28"


def test_a_machine_with_gpus_measures_on_them_and_has_no_dry_runs_with_their_build_of_torch() -> None:
    found = by_name(DGX)
    assert found["measured on GPUs"] == Ability(
        name="measured on GPUs", possible=True, about="up to 4 ranks: NVIDIA H100 80GB HBM3"
    )
    assert not found["dry runs"].possible
    assert found["dry runs"].about == "the fake CUDA device needs torch's CPU build; create an environment"


def test_network_emulation_needs_root_and_two_programs() -> None:
    found = by_name(replace(CPU_ONLY, root=False, programs=("ip", "sbatch"), hta=True, unavailable={"yafsdp": "why"}))
    assert found["network emulation"].about == "lacks root, the program tc"
    assert not found["network emulation"].possible
    assert found["Slurm"].possible
    assert found["cross-check of traces"].possible
    assert found["strategies"].about == "27 of 28; not yafsdp (refshard list strategies says why)"
