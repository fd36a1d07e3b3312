"""Tests of streams, NCCL and device memory, and of ranks with a GPU each. ``pytest -m gpu`` runs those for which there
are enough GPUs (``needs.py``). Bodies that need no GPU run on the CPU as well, and all run on fake GPUs
(``test_on_fake_gpus.py``).
"""
