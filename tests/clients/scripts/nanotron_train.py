"""``torchrun train.py CONFIG``: as nanotron's own run_train.py begins, which its wheel does not carry."""
# mypy: ignore-errors

import sys

from nanotron import logging
from nanotron.trainer import DistributedTrainer

if __name__ == "__main__":
    trainer = DistributedTrainer(sys.argv[1])
    logging.log_rank("made the trainer", logger=logging.get_logger(__name__), rank=0)
