"""``python -m refshard``."""

from refshard.cli import main

main()
