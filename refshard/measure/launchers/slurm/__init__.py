"""Ranks as tasks of Slurm jobs.

submitit was considered. It asks ``sacct`` for a job's state, by default every ten minutes, which needs Slurm's
accounting database. It neither finds a job whose submission was not answered nor signals tasks to ask where they stand.
"""
