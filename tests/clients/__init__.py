"""Frameworks from PyPI that refshard's dry run is tried on; not collected by pytest, see ``run.py``."""
