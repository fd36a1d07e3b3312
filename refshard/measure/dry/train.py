"""``python -m refshard.measure.dry.train model=NAME strategy=NAME ...``: train a case, as a script of its own would.

``refshard dryrun --model`` runs this as the script. It never ends: the dry run stops it after some steps. The arguments
are fields of a case (:data:`~refshard.specs.case.KEYS`).
"""

import os
import sys
from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist

from refshard.measure.trainer import Trainer
from refshard.specs.case import Case
from refshard.specs.model import known_dimensions
from refshard.strategies import strategy_for


def read_case(arguments: Sequence[str]) -> Case:
    """The case that the arguments describe.

    Raises:
        SpecError: it breaks a rule.
    """
    return Case.of(where="dryrun", strict=False, **dict(argument.split("=", 1) for argument in arguments))


def train(case: Case) -> None:
    """Step the case on this rank's device, without end.

    Raises:
        UnsupportedError: the strategy cannot train it.
    """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    assert dist.group.WORLD is not None
    strategy = strategy_for(case, cuda=True)
    trainer = Trainer(case, known_dimensions(case.job.model), strategy, dist.group.WORLD, device)
    if trainer.drops:
        trainer.begin_dropout()
    for step in count():
        trainer.step(trainer.batch(step))


if __name__ == "__main__":
    train(read_case(sys.argv[1:]))
