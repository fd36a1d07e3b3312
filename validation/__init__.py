"""What others and real GPUs measured, beside what refshard predicts.

A checkout has this package, a wheel has not: refshard never imports it, and only ``refshard validate`` looks for it.
``published/`` holds the published figures, ``script/`` the code that stands for the published runs in dry runs.
``dry_runs.json`` is what ``refshard validate --fidelity dryrun`` printed, in the form of ``runs`` of its ``--json``.
"""
