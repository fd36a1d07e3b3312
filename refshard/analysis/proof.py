"""What the launches of a case proved together, and in words why something is not known."""

from collections.abc import Callable

from refshard.analysis.cases import CaseResult
from refshard.plain import plain
from refshard.records import Proof, parity_tolerance


def proof_failures(case: CaseResult) -> tuple[str, ...]:
    """What the launches of this case failed to prove."""
    found = [failure for launch in case.launches if launch.proof for failure in launch.proof.failures]
    return tuple(plain(failure) for failure in dict.fromkeys(found))


def proof_summary(case: CaseResult) -> str:
    """``proved`` by every launch, ``losses not checked`` or ``collectives not checked`` if all else is, ``incomplete``
    (proved by some), ``none``, or ``failed: ...``.
    """
    if failures := proof_failures(case):
        return f"failed: {'; '.join(failures)}"
    proofs = [launch.proof for launch in case.launches if launch.proof is not None]
    if len(proofs) < len(case.launches):
        return "incomplete" if proofs else "none"
    unchecked = {
        "collectives": any(proof.collectives_note for proof in proofs),
        "losses": case.fidelity == "measured" and any(proof.loss_parity is None for proof in proofs),
    }
    if any(unchecked.values()):
        return f"{' and '.join(name for name, is_unchecked in unchecked.items() if is_unchecked)} not checked"
    return "proved" if proofs else "none"


def bit_identical(case: CaseResult) -> bool | None:
    """Whether every launch was bit-identical to DDP; None if one is unknown and none differed."""
    verdicts = [launch.proof.bit_identical_to_ddp if launch.proof else None for launch in case.launches]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def collectives_note(case: CaseResult) -> str:
    """Why the collectives of a trace were not checked."""
    return _notes(case, lambda proof: proof.collectives_note)


def bits_note(case: CaseResult) -> str:
    """Why the case is not bit-identical to DDP, or why that is unknown."""
    return _notes(case, lambda proof: proof.bits_note)


def tolerance(case: CaseResult) -> float:
    """How large the loss parity of this case may be."""
    given = [launch.proof.parity_tolerance for launch in case.launches if launch.proof]
    return next((value for value in given if value is not None), parity_tolerance(case.spec))


def parity_of(case: CaseResult) -> str:
    """The reduced case that the loss parity is of; empty where it is that of the case itself."""
    return next((launch.proof.parity_of for launch in case.launches if launch.proof and launch.proof.parity_of), "")


def parity_note(case: CaseResult) -> str:
    """Why there is no loss parity, or why it is that of a reduced case."""
    return _notes(case, lambda proof: proof.parity_note)


def _notes(case: CaseResult, note: Callable[[Proof], str]) -> str:
    found = (note(launch.proof) for launch in case.launches if launch.proof)
    return plain("; ".join(dict.fromkeys(filter(None, found))))
