"""How each case ends in torch's ``fully_shard``, on two ranks and without variants, where it is not right."""

from tests.distributed.cases.case import Kind

_ENDS: dict[Kind, tuple[str, ...]] = {}


def expected(case: str) -> Kind:
    """How the case of that name ends in FSDP2."""
    return next((kind for kind, cases in _ENDS.items() if case in cases), "right")
