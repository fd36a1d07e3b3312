"""Whether ranks have room on this machine."""

import torch

from refshard.errors import SpecError
from refshard.measure.processor import available_cores
from refshard.specs.case import CaseSpec


def check_fits_machine(case: CaseSpec, processes: int, *, oversubscribe: bool) -> None:
    """Refuse a case of which ``processes`` are to run here, if a GPU or a core would have to serve two of them.

    Raises:
        SpecError: they are too many; more than the cores bear are allowed with ``oversubscribe``.
    """
    gpus = torch.cuda.device_count()
    field = "resident_ranks" if case.fidelity == "emulated" else "world_size"
    if case.device == "cuda" and not gpus:
        raise SpecError(
            'device: \'cuda\' asked for, but torch sees no GPU; set device = "cpu" or "auto", or dry-run the suite '
            "with --dry-run-on CLUSTER"
        )
    if gpus and case.device != "cpu":
        if processes > gpus:
            raise SpecError(f"{field}: {processes} ranks need {processes} GPUs, found {gpus}; lower it")
        return
    wanted, cores = processes * case.threads_per_rank, available_cores()
    if wanted > cores and not oversubscribe:
        raise SpecError(
            f"{field}: {processes} ranks x {case.threads_per_rank} thread(s) exceed the {cores} cores here; "
            "lower it, or pass --oversubscribe to measure contention too"
        )
