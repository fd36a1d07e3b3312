"""Ranks as tasks of Slurm jobs."""
